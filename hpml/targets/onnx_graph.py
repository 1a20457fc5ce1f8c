"""A torch network as an ONNX graph: exported, cleaned, in fp32, fp16 or int8."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpml.artifacts.model import QuantizationSpec
from hpml.artifacts.operation import Operation, free_names
from hpml.core.errors import HpmlError, StageFailed
from hpml.targets.base import MOST_BYTES
from hpml.targets.quiet import quiet
from hpml.tasks import Task

if TYPE_CHECKING:
    from hpml.targets.onnx_int8 import Activations

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"  # the exporter notes the torch layers that a node came from


def export_graphs(
    network: nn.Module, task: Task, operations: Sequence[Operation], *, opset: int
) -> dict[str, onnx.ModelProto]:
    """Each graph of `network` in fp32, batch norms folded into their convolutions, by its name.

    Inputs and outputs have the names, and the free dimensions, of the first operation that uses the graph.
    Raises StageFailed if torch cannot trace or translate one, or if it is too large for one file.
    """
    graphs = task.graphs(network.eval())
    first: dict[str, Operation] = {}
    for operation in operations:
        first.setdefault(operation.graph, operation)
    return {name: export_graph(graphs[name], one, opset=opset) for name, one in first.items()}


def export_graph(network: nn.Module, operation: Operation, *, opset: int) -> onnx.ModelProto:
    """`network` in fp32 with the inputs, outputs and free dimensions of `operation`; see `export_graphs`."""
    try:
        with quiet():
            program = torch.onnx.export(
                network.eval(),
                example_arguments(operation),
                dynamo=True,
                opset_version=opset,
                input_names=[one.name for one in operation.inputs],
                output_names=[one.name for one in operation.outputs],
                dynamic_shapes=_by_parameter(network, _free_dimensions(operation)),
                verbose=False,
            )
    except HpmlError:  # a signal's
        raise
    except Exception as error:  # whatever the exporter's passes, or the network's own code, raise
        raise _not_exportable(_cause(error)) from error
    assert program is not None  # dynamo=True
    graph = program.model_proto
    _name_layers(graph)
    for end in (*graph.graph.input, *graph.graph.output):
        batch = end.type.tensor_type.shape.dim[0]
        if not batch.dim_param:  # the exporter is silent about a forward that fixes it
            raise _not_exportable(f"{end.name} has a batch of {batch.dim_value} in the graph")
    if graph.ByteSize() > MOST_BYTES:
        raise StageFailed("the network does not fit one ONNX file", why="the limit is 2 GB")
    return graph


def _name_layers(graph: onnx.ModelProto) -> None:
    """Name what the exporter gave names of its own: a diagnosis tells layers by their weights, or their node.

    These are weights that it transposed, and nodes that a layer made as an operator of ONNX.
    """
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    uses = Counter(name for node in graph.graph.node for name in node.input)
    taken = {*constants, *(node.name for node in graph.graph.node)}
    for node in graph.graph.node:
        layer = _layer_of(node, "")
        if "_symbolic_" in node.name and layer not in taken:
            node.name = layer
        weights = node.input[1] if node.op_type == "MatMul" else ""
        named = f"{layer}.weight_transposed"
        if weights in constants and uses[weights] == 1 and ".weight" not in weights and named not in taken:
            node.input[1] = constants[weights].name = named
        taken |= {node.name, *node.input}


def example_arguments(operation: Operation) -> tuple[Tensor, ...]:
    """Zeros of the shapes of its inputs; each free dimension has a size of its own, none of them 1.

    torch.export takes a dimension of 1 for a constant.
    """
    named = {name for one in operation.inputs for size in one.shape for name in free_names(size)}
    sizes = {"batch": 2} | {name: 3 + place for place, name in enumerate(sorted(named - {"batch"}))}
    return tuple(torch.zeros(one.sizes(**sizes), dtype=getattr(torch, one.dtype)) for one in operation.inputs)


def _free_dimensions(operation: Operation) -> tuple[dict[int, Any], ...]:
    """For torch.export: which axes of each input are free, by the name of their dimension."""
    free = {size for one in operation.inputs for size in one.shape if isinstance(size, str)}
    # Only this spelling has the bounds of a batch checked; names let torch relate dimensions to each other.
    known = {name: torch.export.Dim(name, min=1) if free == {"batch"} else name for name in free}
    return tuple(
        {axis: known[size] for axis, size in enumerate(one.shape) if isinstance(size, str)}
        for one in operation.inputs
    )


def _by_parameter(network: nn.Module, of_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """`of_inputs` as torch.export wants them: what a parameter like `*past` takes is one tuple."""
    parameters = list(inspect.signature(network.forward).parameters.values())
    for place, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return (*of_inputs[:place], of_inputs[place:])
    return of_inputs


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


def modules_of_graphs(network: nn.Module, task: Task) -> dict[str, str]:
    """The name that the module behind each graph has in `network`; "" of the network itself."""
    names = {module: name for name, module in network.named_modules()}
    return {graph: names.get(module, "") for graph, module in task.graphs(network).items()}


def nodes_of_layers(
    graphs: Mapping[str, onnx.ModelProto], layers: Iterable[str], modules: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Of each graph the names of the nodes that came from the torch modules `layers`, or from inside them.

    modules: see `modules_of_graphs`; None: each graph is of the network itself. A convolution with a folded
    batch norm carries the batch norm's name, so the weights' names count as well.
    Raises StageFailed if no graph has a node of a layer.
    """
    found: dict[str, list[str]] = {name: [] for name in graphs}
    for layer in layers:
        nodes = {
            name: [
                node.name
                for node in graph.graph.node
                if _is_of_layer(node, layer, (modules or {}).get(name, ""))
            ]
            for name, graph in graphs.items()
        }
        if not any(nodes.values()):
            raise StageFailed(
                f"the excluded layer {layer!r} is not in the exported graph",
                fix="name a convolution or linear layer, or a module that holds some",
            )
        for name, of_graph in nodes.items():
            found[name] += of_graph
    return found


def layers_by_node(
    graphs: Mapping[str, onnx.ModelProto], modules: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Of each graph the torch module that each node came from; modules: see `modules_of_graphs`."""
    return {
        name: {node.name: _layer_of(node, modules[name]) for node in graph.graph.node}
        for name, graph in graphs.items()
    }


def _layer_of(node: onnx.NodeProto, module: str) -> str:
    scopes = [entry.value for entry in node.metadata_props if entry.key == _NAME_SCOPES]
    if not scopes:
        return node.name
    # Such as "['', 'blocks.0', 'blocks.0.mlp', 'linear_3']": the last is the operation itself.
    inside = ast.literal_eval(scopes[0])[:-1]
    return ".".join(filter(None, (module, *inside[-1:]))) or node.name


def _is_of_layer(node: onnx.NodeProto, layer: str, module: str) -> bool:
    """Whether `node`, of the graph of `module`, came from `layer`: both are names in the network."""
    if module:
        if f"{module}.".startswith(f"{layer}."):
            return True
        if not layer.startswith(f"{module}."):
            return False
        layer = layer.removeprefix(f"{module}.")
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
    samples: Mapping[str, NDArray[Any]],
    *,
    activations: Activations,
    excluded_nodes: list[str],
    operators: Sequence[str] = (),
    reduce_range: bool = False,
    for_tensorrt: bool = False,
) -> dict[str, float]:
    """Write the graph of the file `fp32` with Q/DQ nodes to `place`; see `quantize_graph`."""
    from hpml.targets.onnx_int8 import quantize_graph

    coarse = quantize_graph(
        fp32,
        place,
        spec,
        samples,
        activations=activations,
        excluded_nodes=excluded_nodes,
        operators=operators,
        reduce_range=reduce_range,
        for_tensorrt=for_tensorrt,
    )
    save_graph(onnx.load(place), place)
    return coarse
