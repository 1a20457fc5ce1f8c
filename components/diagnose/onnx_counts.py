"""FLOPs of the nodes of an ONNX graph as ONNX Runtime runs it, its fused and quantized ones included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from hpml.components.diagnose.layers import Channels, Role

Shape = tuple[int, ...]

CONVOLUTIONS = frozenset({"Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"})
PRODUCTS = frozenset(
    {"Gemm", "FusedGemm", "MatMul", "FusedMatMul", "FusedMatMulActivation", "MatMulInteger", "QGemm"}
    | {"MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"}
)
_PACKED_ATTENTION = frozenset({"Attention", "QAttention"})  # of com.microsoft: with the projections' weights
_ATTENTION = _PACKED_ATTENTION | {
    "MultiHeadAttention",
    "GroupQueryAttention",
    "DecoderMaskedMultiHeadAttention",
}
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
_WITH_WEIGHTS = CONVOLUTIONS | PRODUCTS | _PACKED_ATTENTION | {"ConvTranspose", "MatMulNBits"}
_OWN_GRAPHS = frozenset({"If", "Loop", "Scan"})
# The inputs that are tables of which a node reads some rows only, as many as it gives out.
_TABLES = {
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "GatherBlockQuantized": (0,),
    "EmbedLayerNormalization": (2, 3, 4),
    "QEmbedLayerNormalization": (2, 3, 4),
}
_WEIGHTS_FOURTH = frozenset({"QLinearConv", "QLinearMatMul", "QGemm"})  # behind x, its scale and zero point
CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape"})  # move no data
_MOVES = (
    _LAYOUT
    | {
        "Cast",
        "Concat",
        "Expand",
        "Gather",
        "Pad",
        "Slice",
        "Split",
        "Tile",
        "QLinearConcat",
        "Where",
        "Trilu",
    }
    | {
        "GatherElements",
        "GatherND",
        "Scatter",
        "ScatterElements",
        "ScatterND",
        "OneHot",
        "NonZero",
        "Compress",
    }
    | {"Range", "ConstantOfShape", "DepthToSpace", "SpaceToDepth", "ReverseSequence", "Constant"}
)
_PER_INPUT = frozenset(
    {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"}
    | {"ReduceSumSquare", "ReduceLogSumExp", "ArgMax", "ArgMin", "TopK"}
    | {"GlobalAveragePool", "GlobalMaxPool", "QLinearGlobalAveragePool"}
)
# Operations on each element of the output, for what is more than one: a softmax subtracts the largest, takes
# the exponential, adds up and divides; a normalisation takes a mean, a variance, scales and shifts; what is
# fused counts as its parts do.
_PER_OUTPUT = {
    "Softmax": 5,
    "LogSoftmax": 5,
    "QLinearSoftmax": 5,
    "BiasSoftmax": 6,
    "Gelu": 5,
    "BiasGelu": 6,
    "FastGelu": 8,
    "QuickGelu": 3,
    "RotaryEmbedding": 3,
    "RMSNormalization": 5,
    "SimplifiedLayerNormalization": 5,
    "SkipSimplifiedLayerNormalization": 6,
    "InstanceNormalization": 8,
    "GroupNormalization": 8,
    "EmbedLayerNormalization": 10,
    "LayerNormalization": 8,
    "SkipLayerNormalization": 9,
    "BatchNormalization": 2,
}
_QUANTIZED_WITHOUT_PREFIX = frozenset(
    {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm", "QAttention"}
)


@dataclass(frozen=True)
class Node:
    """A node with the shapes of what goes in and out. weights: that of its weights, () if it has none."""

    op: str
    attributes: dict[str, Any]
    inputs: tuple[Shape, ...]  # an input that is absent or unknown has the shape ()
    outputs: tuple[Shape, ...]
    weights: Shape = ()

    @classmethod
    def of(cls, proto: onnx.NodeProto, shapes: Mapping[str, Shape], weights: Shape) -> Node:
        """That of a graph. shapes: of its tensors, by name."""
        return cls(
            proto.op_type,
            {attribute.name: helper.get_attribute_value(attribute) for attribute in proto.attribute},
            tuple(shapes.get(name, ()) for name in proto.input),
            tuple(shapes[name] for name in proto.output if name in shapes),
            weights,
        )

    @property
    def channels_last(self) -> bool:
        """Whether its activations are (batch, height, width, channels)."""
        return self.op.startswith("Nhwc") or bool(self.attributes.get("channels_last"))


def is_quantized(op: str) -> bool:
    """Whether `op` computes with int8 numbers."""
    return op.startswith("QLinear") or op in _QUANTIZED_WITHOUT_PREFIX


def role(op: str) -> Role:
    """Whether `op` quantizes or dequantizes, or only lays its input out anew."""
    return "conversion" if op in CONVERSIONS else "layout" if op in _LAYOUT else ""


def layer_name(weights: str) -> str:
    """The layer of the network that a weight belongs to: "layer1.0.conv1" of "layer1.0.conv1.weight"."""
    layer, found, _ = weights.partition(".weight")
    return layer if found else ""


def is_view(op: str) -> bool:
    """Whether `op` gives its input another shape and moves nothing."""
    return op in _VIEWS


def flops(node: Node) -> int:
    """Operations of `node`, 2 per multiply-accumulate; 0 of what only moves or converts data."""
    if node.op in _VIEWS | _MOVES | CONVERSIONS or not node.outputs:
        return 0
    results = math.prod(node.outputs[0])
    if node.op in _OWN_GRAPHS:
        return 0
    if node.op in CONVOLUTIONS:
        return _convolution_flops(node)
    if node.op == "ConvTranspose":
        return 2 * math.prod(node.inputs[0]) * math.prod(node.weights[1:])
    if node.op in PRODUCTS:
        inner = node.inputs[0][-2 if node.attributes.get("transA") else -1]
        return 2 * results * inner
    if node.op == "MatMulNBits":
        return 2 * results * int(node.attributes["K"])
    if node.op == "Einsum":
        return 2 * results * _summed(node)
    if node.op in _RECURRENT:
        return _recurrent_flops(node)
    if node.op in _ATTENTION:
        return _attention_flops(node)
    if "Pool" in node.op and node.op not in _PER_INPUT:
        return results * int(math.prod(node.attributes.get("kernel_shape", ())))
    if node.op in _PER_INPUT:
        return math.prod(node.inputs[0])
    return results * _PER_OUTPUT.get(node.op, 1)


def _convolution_flops(node: Node) -> int:
    """Of the channels that the weights have: in a blocked layout the outputs have some more."""
    out_channels, *of_each = node.weights
    shape = node.outputs[0]
    positions = shape[0] * math.prod(shape[1:-1] if node.channels_last else shape[2:])
    return 2 * positions * out_channels * math.prod(of_each)


def _attention_flops(node: Node) -> int:
    """Scores and their product with the values; with packed weights also the three projections.

    Queries are (batch, queries, heads * size) or (batch, heads, queries, size), keys likewise; those of
    before are (batch, heads, keys, size). Packed queries, keys and values count by the outputs.
    """
    values = math.prod(node.outputs[0])  # as many numbers as the queries have
    if node.weights:  # (input, 3 * hidden)
        batch, queries, _ = node.outputs[0]
        return 2 * batch * queries * math.prod(node.weights) + 2 * 2 * values * queries
    given = [shape for shape in node.inputs[:2] if shape]
    has_keys = len(given) > 1 and len(given[1]) in (3, 4)
    asking = math.prod(given[0]) if has_keys else values
    present = [shape for shape in node.outputs[1:] if len(shape) == 4]  # the keys, those of before included
    keys = present[0][2] if present else given[1][-2] if has_keys else node.outputs[0][-2]
    return 2 * keys * (asking + values)


def _recurrent_flops(node: Node) -> int:
    """The products of each step with the weights (directions, gates * hidden, ...) of input and state."""
    steps_and_batch = math.prod(node.inputs[0][:2])
    return 2 * steps_and_batch * sum(math.prod(shape[1:]) for shape in node.inputs[1:3]) * node.inputs[1][0]


def _summed(node: Node) -> int:
    """The elements over which an Einsum adds up: of the labels that its output lacks."""
    equation = node.attributes["equation"]
    left, arrow, right = (equation.decode() if isinstance(equation, bytes) else equation).partition("->")
    sizes: dict[str, int] = {}
    terms = left.replace(" ", "").split(",")
    for term, shape in zip(terms, node.inputs, strict=False):
        front, _, back = term.partition("...")
        sizes |= dict(zip(front, shape, strict=False)) | dict(
            zip(reversed(back), reversed(shape), strict=False)
        )
    lost = sizes.keys() - set(right) if arrow else {label for label in sizes if left.count(label) > 1}
    return math.prod(sizes[label] for label in lost)


def has_own_graph(op: str) -> bool:
    """Whether `op` runs a graph of its own, whose operations are not counted."""
    return op in _OWN_GRAPHS


def tables_of(proto: onnx.NodeProto) -> frozenset[str]:
    """The tensors of which a node reads only as much as it gives out, such as embeddings."""
    places = _TABLES.get(proto.op_type, ())
    return frozenset(proto.input[place] for place in places if place < len(proto.input))


def channels(node: Node) -> Channels:
    """Those that its weights have."""
    if node.op in CONVOLUTIONS and node.weights:
        groups = int(node.attributes.get("group", 1))
        return Channels(node.weights[1] * groups, node.weights[0], groups)
    if node.op in PRODUCTS and len(node.weights) == 2:
        return Channels(*(node.weights[::-1] if node.attributes.get("transB") else node.weights))
    return Channels()


def weights_of(proto: onnx.NodeProto) -> str:
    """The name of the tensor that a node takes for its weights; empty if there is none."""
    if proto.op_type not in _WITH_WEIGHTS or (proto.op_type in _PACKED_ATTENTION and not proto.domain):
        return ""  # ONNX's own Attention has keys in that place
    index = 3 if proto.op_type in _WEIGHTS_FOURTH else 1
    return str(proto.input[index]) if index < len(proto.input) else ""
