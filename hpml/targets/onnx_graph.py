"""A torch network as an ONNX graph: exported, cleaned, in fp32, fp16 or int8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from hpml.artifacts.model import QuantizationSpec
from hpml.artifacts.model_input import InputSpec
from hpml.core.errors import HpmlError, StageFailed
from hpml.targets.quiet import quiet

if TYPE_CHECKING:
    from hpml.targets.onnx_int8 import Activations

OUTPUT = "logits"
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter notes the torch layers that a node came from
_MAX_BYTES = 2**31 - 1  # of one protobuf message


def export_graph(network: nn.Module, spec: InputSpec, *, opset: int) -> onnx.ModelProto:
    """`network` in fp32, batch norms folded into their convolutions, batch free: `x_nchw` to `logits`.

    Raises StageFailed if torch cannot trace or translate it, or if it is too large for one file.
    """
    example = torch.zeros(2, *spec.shape_chw)  # torch.export takes a batch of 1 for a constant
    try:
        with quiet():
            program = torch.onnx.export(
                network.eval(),
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=[spec.name],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                verbose=False,
            )
    except HpmlError:  # a signal's
        raise
    except Exception as error:  # whatever the exporter's passes, or the network's own code, raise
        raise _not_exportable(_cause(error)) from error
    assert program is not None  # dynamo=True
    graph = program.model_proto
    for end in (*graph.graph.input, *graph.graph.output):
        batch = end.type.tensor_type.shape.dim[0]
        if not batch.dim_param:  # the exporter is silent about a forward that fixes it
            raise _not_exportable(f"{end.name} has a batch of {batch.dim_value} in the graph")
    if graph.ByteSize() > _MAX_BYTES:
        raise StageFailed("the network does not fit one ONNX file", why="the limit is 2 GB")
    return graph


def _not_exportable(why: str) -> StageFailed:
    return StageFailed(
        "the network cannot be exported to ONNX with a free batch",
        why=why,
        fix="its forward must be traceable by torch.export and must not fix the batch size",
    )


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def nodes_of_layers(graph: onnx.ModelProto, layers: Iterable[str]) -> list[str]:
    """The names of the nodes that came from the torch modules `layers`, or from a module inside them.

    A convolution with a folded batch norm carries the batch norm's name, so the weights' names count as well.
    Raises StageFailed if there is no node of a layer.
    """
    found: list[str] = []
    for layer in layers:
        nodes = [node.name for node in graph.graph.node if _is_of_layer(node, layer)]
        if not nodes:
            raise StageFailed(
                f"the excluded layer {layer!r} is not in the exported graph",
                fix="name a convolution or linear layer, or a module that holds some",
            )
        found += nodes
    return found


def _is_of_layer(node: onnx.NodeProto, layer: str) -> bool:
    scopes = [entry.value for entry in node.metadata_props if entry.key == _NAME_SCOPES]
    return any(repr(layer) in scope for scope in scopes) or any(
        name.startswith(f"{layer}.") for name in node.input
    )


def save_graph(graph: onnx.ModelProto, place: Path) -> None:
    """Write `graph` checked, without what says where and when it was made: the same graph, the same bytes."""
    for collection in (graph.graph.node, graph.graph.input, graph.graph.output, graph.graph.initializer):
        for entry in collection:
            entry.doc_string = ""
            del entry.metadata_props[:]
    graph.doc_string = graph.graph.doc_string = ""
    del graph.metadata_props[:], graph.graph.metadata_props[:]
    del graph.graph.value_info[:]  # inferred again by every reader; stale, it breaks ONNX Runtime's quantizer
    onnx.checker.check_model(graph, full_check=True)
    place.write_bytes(graph.SerializeToString(deterministic=True))


def to_fp16(graph: onnx.ModelProto) -> onnx.ModelProto:
    """`graph` with fp16 weights and arithmetic between an fp32 input and an fp32 output."""
    from onnxruntime.quantization.onnx_model import ONNXModel
    from onnxruntime.transformers.float16 import convert_float_to_float16

    converted = ONNXModel(convert_float_to_float16(graph, keep_io_types=True))
    converted.topological_sort()  # the converter appends its casts
    graph_fp16: onnx.ModelProto = converted.model
    return graph_fp16


def to_int8(
    fp32: Path,
    place: Path,
    spec: QuantizationSpec,
    x_nchw: NDArray[np.float32],
    *,
    activations: Activations,
    excluded_nodes: list[str],
    reduce_range: bool = False,
    for_tensorrt: bool = False,
) -> None:
    """Write the graph of the file `fp32` with Q/DQ nodes to `place`; see `quantize_graph`."""
    from hpml.targets.onnx_int8 import quantize_graph

    quantize_graph(
        fp32,
        place,
        spec,
        {onnx.load(fp32).graph.input[0].name: x_nchw},
        activations=activations,
        excluded_nodes=excluded_nodes,
        reduce_range=reduce_range,
        for_tensorrt=for_tensorrt,
    )
    save_graph(onnx.load(place), place)
