"""ONNX files from anywhere, read as data before a runtime opens them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid
from hpml.targets.base import MOST_BYTES

_MOST_NUMBERS_PER_BYTE = 4  # of 2 bits
_KNOWN_DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"}
_QUANTIZING = ("Quantize", "Dequantize", "DynamicQuantize", "QLinear", "QGemm", "QAttention", "QEmbed")
_INTEGER = {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits"}


def read_graph(file: Path) -> onnx.ModelProto:
    """The model in `file`, without the weights that lie in other files.

    Raises ConfigInvalid if it is not an ONNX file, or one too large to be one.
    """
    if why := regular_files.problem(file):
        raise ConfigInvalid(f"{file} is not an ONNX file", why=f"it {why}")
    try:
        size_bytes = file.stat().st_size
        if size_bytes > MOST_BYTES:
            raise ConfigInvalid(
                f"{file} is not an ONNX file",
                why=f"it has {size_bytes:,} bytes, and no ONNX file has more than {MOST_BYTES:,}",
                fix="keep its weights in a file beside it (external data)",
            )
        return onnx.load_model(file, load_external_data=False)
    except (DecodeError, OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{file} is not an ONNX file", why=str(error)) from None


def read_runnable(file: Path) -> onnx.ModelProto:
    """As `read_graph`, of a model that ONNX Runtime can open.

    Raises ConfigInvalid for operators of somebody's own library, for weights outside its folder, and for
    tensors of more numbers than its files can hold.
    """
    model = read_graph(file)
    if found := custom_operators(model):
        raise ConfigInvalid(
            f"{file} needs a library of its own",
            why=f"ONNX Runtime does not have {', '.join(found)}; no code is loaded for a model",
        )
    beside = weights_beside(model, file)
    size_bytes = sum(place.stat().st_size for place in (file, *beside))
    for tensor in tensors(model):
        numbers = math.prod(tensor.dims)
        if numbers > _MOST_NUMBERS_PER_BYTE * size_bytes or min(tensor.dims, default=0) < 0:
            raise ConfigInvalid(
                f"{file} is refused",
                why=f"its tensor {tensor.name!r} is said to hold {' x '.join(map(str, tensor.dims))} "
                f"numbers, the file and its weights have {size_bytes:,} bytes",
            )
    return model


def weights_beside(model: onnx.ModelProto, file: Path) -> list[Path]:
    """The files in which weights of `model` lie, all of them in the folder of `file`.

    Raises ConfigInvalid that names one that lies elsewhere, or is no regular file.
    """
    folder = file.resolve().parent
    found = []
    for location in sorted({location for tensor in tensors(model) if (location := _location(tensor))}):
        place = folder / location
        if place.is_symlink() or not place.resolve().is_relative_to(folder) or not place.is_file():
            raise ConfigInvalid(
                f"{file} is refused",
                why=f"its weights are said to be in {location!r}, outside its folder or absent",
            )
        found.append(place)
    return found


def _location(tensor: onnx.TensorProto) -> str:
    """The file that a tensor's numbers are in; empty if they are in the model."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return ""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def load_whole(file: Path) -> onnx.ModelProto:
    """The model with all its weights.

    Raises ConfigInvalid as `read_runnable` does, and for more weights than fit into one file.
    """
    model = read_runnable(file)
    size_bytes = file.stat().st_size + sum(place.stat().st_size for place in weights_beside(model, file))
    if size_bytes > MOST_BYTES:
        raise ConfigInvalid(
            f"{file} is too large",
            why=f"with its weights it has {size_bytes:,} bytes, {MOST_BYTES:,} are allowed",
        )
    try:
        onnx.load_external_data_for_model(model, str(file.resolve().parent))
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise ConfigInvalid(f"the weights of {file} cannot be read", why=str(error)[:300]) from None
    return model


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those in loops, branches and functions too."""
    pending = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                pending += graph.node


def inlined_nodes(model: onnx.ModelProto) -> float:
    """How many nodes the graph has with its functions in it; infinite where one calls itself."""
    own = {(function.domain, function.name): function.node for function in model.functions}
    counts: dict[tuple[str, str], float] = {}

    def count(nodes: Sequence[onnx.NodeProto]) -> float:
        total = 0.0
        for node in nodes:
            called = (node.domain, node.op_type)
            if called in own and called not in counts:
                counts[called] = math.inf  # until it is known
                counts[called] = count(own[called])
            total += counts.get(called, 1)
            for attribute in node.attribute:
                total += sum(count(graph.node) for graph in (attribute.g, *attribute.graphs))
        return total

    try:
        return count(model.graph.node)
    except RecursionError:
        return math.inf


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All constants, wherever they are."""
    graphs = [model.graph]
    for node in nodes(model):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            yield from _dense((attribute.sparse_tensor, *attribute.sparse_tensors))
            graphs += (attribute.g, *attribute.graphs)
    for graph in graphs:
        yield from graph.initializer
        yield from _dense(graph.sparse_initializer)


def _dense(
    tensors: Iterator[onnx.SparseTensorProto] | tuple[onnx.SparseTensorProto, ...],
) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def quantized_operators(model: onnx.ModelProto) -> list[str]:
    """The operators that compute with 8 bits or convert to them, each once."""
    return sorted(
        {
            node.op_type
            for node in nodes(model)
            if node.op_type.startswith(_QUANTIZING) or node.op_type in _INTEGER
        }
    )


def custom_operators(model: onnx.ModelProto) -> list[str]:
    """The operators that ONNX Runtime knows only from somebody's own library, as domain:name."""
    own = {(function.domain, function.name) for function in model.functions}
    return sorted(
        {
            f"{node.domain}:{node.op_type}"
            for node in nodes(model)
            if node.domain not in _KNOWN_DOMAINS and (node.domain, node.op_type) not in own
        }
    )


def precision_of(model: onnx.ModelProto) -> str:
    """ "int8" if it is quantized, otherwise the type of most of its weights."""
    if quantized_operators(model):
        return "int8"
    names = {
        onnx.TensorProto.FLOAT16: "fp16",
        onnx.TensorProto.BFLOAT16: "bf16",
        onnx.TensorProto.DOUBLE: "fp64",
        onnx.TensorProto.FLOAT: "fp32",
    }
    counts = dict.fromkeys(names, 0)
    for tensor in model.graph.initializer:
        if tensor.data_type in counts:
            counts[tensor.data_type] += math.prod(tensor.dims)
    most = max(counts, key=lambda kind: counts[kind])
    return names[most] if counts[most] else "fp32"
