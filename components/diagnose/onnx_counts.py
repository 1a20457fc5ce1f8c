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
_WITH_WEIGHTS = CONVOLUTIONS | PRODUCTS | {"ConvTranspose", "Attention", "QAttention"}
_WEIGHTS_FOURTH = frozenset({"QLinearConv", "QLinearMatMul", "QGemm"})  # behind x, its scale and zero point
CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape"})  # move no data
_MOVES = _LAYOUT | {"Cast", "Concat", "Expand", "Gather", "Pad", "Slice", "Split", "Tile", "QLinearConcat"}
_PER_INPUT = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "GlobalAveragePool", "GlobalMaxPool"}) | {
    "QLinearGlobalAveragePool"
}
# Operations on each element of the output, for what is more than one: a softmax subtracts the largest, takes
# the exponential, adds up and divides; a normalisation takes a mean, a variance, scales and shifts.
_PER_OUTPUT = {
    "Softmax": 5,
    "QLinearSoftmax": 5,
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
    if node.op in CONVOLUTIONS:
        return _convolution_flops(node)
    if node.op == "ConvTranspose":
        return 2 * math.prod(node.inputs[0]) * math.prod(node.weights[1:])
    if node.op in PRODUCTS:
        inner = node.inputs[0][-2 if node.attributes.get("transA") else -1]
        return 2 * results * inner
    if node.op in ("MultiHeadAttention", "Attention", "QAttention"):
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
    """Scores and their product with the values; with packed weights also the three projections."""
    batch, queries, hidden = node.outputs[0]
    projections = 0
    keys = queries
    if node.weights:  # (input, 3 * hidden)
        projections = 2 * batch * queries * math.prod(node.weights)
    elif len(node.inputs) > 1 and len(node.inputs[1]) == 3:
        keys = node.inputs[1][1]
    return projections + 2 * 2 * batch * queries * keys * hidden


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
    if proto.op_type not in _WITH_WEIGHTS:
        return ""
    index = 3 if proto.op_type in _WEIGHTS_FOURTH else 1
    return str(proto.input[index]) if index < len(proto.input) else ""
