"""Layers into which a runtime fused nodes of an ONNX graph: what each computes and moves.

FLOPs and weights are counted on the nodes that a layer names, bytes on the tensors that it takes and gives.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpml.components.diagnose.layers import Layer, Precision, Profile, Role
from hpml.components.diagnose.onnx_nodes import GraphNode

_UNNAMED_WORTH_A_NOTE = 0.01  # of the operations
_NAMED = 4  # in a note
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1}
# What only copies. It may name the nodes whose tensors it copies.
_COPIES = frozenset({"Reformat", "Shuffle", "NoOp", "Reorder"})
_PRODUCT = re.compile(r"conv(?!ert)|gemm|matmul|matrixmultiply|mha|fullyconnected", re.IGNORECASE)


@dataclass(frozen=True)
class Tensor:
    """An input or output of a layer. dtype: as in "fp16"; empty if it is none that we know."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str  # the runtime's words for its type and layout

    @property
    def bytes(self) -> int:
        """Without what a layout fills channels up with; a dimension of -1 is the batch, which is 1."""
        return math.prod(max(1, size) for size in self.shape) * ITEMSIZE.get(self.dtype, 4)


@dataclass(frozen=True)
class FusedLayer:
    """A layer as its runtime describes it. nodes: those of the ONNX graph that it names."""

    name: str
    type: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    nodes: tuple[str, ...] = ()
    kernel: str = ""
    time_us: float = 0.0

    @property
    def formats(self) -> str:
        """In words."""
        fed, given = (", ".join(tensor.format for tensor in side) for side in (self.inputs, self.outputs))
        return f"{fed} -> {given}" if fed or given else ""


def profile_of(timed: Sequence[FusedLayer], nodes: Mapping[str, GraphNode], notes: Sequence[str]) -> Profile:
    """The profile of layers that name nodes of an ONNX graph. notes: what the runtime left unsaid of them."""
    owned = _owned(timed, nodes)
    layers = tuple(_layer(one, [nodes[name] for name in owned[index]]) for index, one in enumerate(timed))
    return Profile(layers, notes=(*notes, *_notes(timed, layers, nodes)))


def _owned(timed: Sequence[FusedLayer], nodes: Mapping[str, GraphNode]) -> dict[int, list[str]]:
    """By the index of a layer, the nodes whose arithmetic counts there.

    Several layers may name a node, such as a product and the layers that bring its input in place. It counts
    in one: a product in a layer whose type or kernel is one, and everything in the slowest of those left.
    """
    naming: dict[str, list[int]] = defaultdict(list)
    for index, one in enumerate(timed):
        for name in dict.fromkeys(one.nodes):
            if one.type not in _COPIES:
                naming[name].append(index)
    owned: dict[int, list[str]] = defaultdict(list)
    for name, node in nodes.items():
        able = naming[name]
        if node.is_product:
            able = [index for index in able if _is_product(timed[index])] or able
        if able and node.flops:
            owned[max(able, key=lambda index: timed[index].time_us)].append(name)
    return owned


def _is_product(layer: FusedLayer) -> bool:
    return _PRODUCT.search(f"{layer.type} {layer.kernel}") is not None


def _layer(timed: FusedLayer, nodes: Sequence[GraphNode]) -> Layer:
    products = [node for node in nodes if node.is_product]
    only = products[0] if len(products) == 1 else GraphNode("", 0)
    flops = sum(node.flops or 0 for node in nodes)
    precision = _precision(timed, multiplies=bool(products))
    return Layer(
        name=only.layer or timed.name,
        op=timed.type,
        precision=precision,
        flops=flops,
        weight_bytes=sum(node.weights for node in nodes) * ITEMSIZE[precision],
        activation_bytes=sum(tensor.bytes for tensor in (*timed.inputs, *timed.outputs)),
        time_us=timed.time_us,
        channels=only.channels,
        role="" if flops else _role(timed),
        nodes=timed.nodes,
        formats=timed.formats,
        kernel=timed.kernel,
    )


def _precision(layer: FusedLayer, *, multiplies: bool) -> Precision:
    """A product multiplies what comes in; all else is as wide as what it gives."""
    tensors = layer.inputs if multiplies else layer.outputs
    kinds: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "int8": "int8"}
    return kinds.get(tensors[0].dtype, "fp32") if tensors else "fp32"


def _role(layer: FusedLayer) -> Role:
    """Of a layer without arithmetic."""
    fed, given = ({tensor.dtype for tensor in side} for side in (layer.inputs, layer.outputs))
    if ("int8" in fed) != ("int8" in given):
        return "conversion"
    return "layout" if layer.type in _COPIES else ""


def _notes(timed: Sequence[FusedLayer], layers: Sequence[Layer], nodes: Mapping[str, GraphNode]) -> list[str]:
    """What could not be counted."""
    tensors = {tensor for one in timed for tensor in (*one.inputs, *one.outputs)}
    uncounted = {
        "tensors of unknown types count 4 bytes an element": sorted(
            tensor.name for tensor in tensors if not tensor.dtype
        ),
        "operations without known shapes are not counted": [
            name for name, node in nodes.items() if node.flops is None
        ],
    }
    notes = [listed(what, names) for what, names in uncounted.items() if names]
    flops = sum(node.flops or 0 for node in nodes.values())
    unnamed = 1 - sum(layer.flops for layer in layers) / flops if flops else 0.0
    if unnamed > _UNNAMED_WORTH_A_NOTE:
        notes.append(f"{100 * unnamed:.0f} % of the operations are in nodes that no timed layer names")
    return notes


def listed(what: str, names: Sequence[str]) -> str:
    """A note on `names`, of which it gives the first."""
    return f"{what} ({len(names)}): {', '.join(names[:_NAMED])}"
