"""What each node of an ONNX graph computes and with how many weights, by the shapes its input implies."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from hpml.components.diagnose import onnx_counts
from hpml.components.diagnose.layers import Channels
from hpml.components.diagnose.onnx_counts import Node, Shape

Feeds = Mapping[str, NDArray[Any]]  # input name -> array, the batch in front

# What leaves a weight a weight: it reaches its node by way of these.
_PASS_WEIGHTS_ON = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast", "Identity", "Transpose"})


@dataclass(frozen=True)
class GraphNode:
    """A node at batch 1.

    flops: None where a shape cannot be inferred. weights: elements of its constant inputs. layer: that of the
    network which its weights belong to; empty if it has none.
    """

    op: str
    flops: int | None
    weights: int = 0
    layer: str = ""
    channels: Channels = field(default_factory=Channels)

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution or a matrix product."""
        return self.op in onnx_counts.CONVOLUTIONS or self.op in onnx_counts.PRODUCTS


def read(file: Path, request: Feeds) -> dict[str, GraphNode]:
    """The nodes of the graph in `file` by name, as they are for a request: its inputs by name.

    All inputs of the graph that a request does not have are taken for weights.
    """
    model = onnx.load(file)
    _fill_sizes(model.graph, request)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = _shapes(graph)
    roots = _constants(graph, request)
    return {node.name: _node(node, shapes, roots) for node in graph.node}


def _fill_sizes(graph: onnx.GraphProto, request: Feeds) -> None:
    """Give the free dimensions of the graph's ends the sizes that they have in `request`."""
    sizes: dict[str, int] = {}
    for end in graph.input:
        if end.name in request:
            dimensions = end.type.tensor_type.shape.dim
            for dimension, size in zip(dimensions, request[end.name].shape, strict=True):
                if dimension.dim_param:
                    sizes[dimension.dim_param] = size
                dimension.dim_value = size
    for end in graph.output:
        for dimension in end.type.tensor_type.shape.dim:
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
            elif dimension.dim_param:
                dimension.Clear()  # follows from the others


def _shapes(graph: onnx.GraphProto) -> dict[str, Shape]:
    """Of every tensor whose shape is known."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        dimensions = kind.shape.dim
        if kind.HasField("shape") and all(dimension.HasField("dim_value") for dimension in dimensions):
            shapes[value.name] = tuple(dimension.dim_value for dimension in dimensions)
    return shapes


def _constants(graph: onnx.GraphProto, data: Container[str]) -> dict[str, str]:
    """The tensors that are the same for every request, and the name of the weights each was made of."""
    roots = {tensor.name: tensor.name for tensor in graph.initializer}
    roots |= {value.name: value.name for value in graph.input if value.name not in data}
    for node in graph.node:  # in the order they run
        if node.op_type == "Constant":
            roots[node.output[0]] = node.output[0]
        elif node.op_type in _PASS_WEIGHTS_ON and node.input[0] in roots:
            roots[node.output[0]] = roots[node.input[0]]
    return roots


def _node(proto: onnx.NodeProto, shapes: dict[str, Shape], roots: dict[str, str]) -> GraphNode:
    op = proto.op_type
    if all(name in roots for name in proto.input if name):
        return GraphNode(op, 0)  # it makes weights, once and for all
    weights = onnx_counts.weights_of(proto)
    if not {proto.input[0], weights or proto.input[0], *proto.output} <= shapes.keys():
        return GraphNode(op, None)
    node = Node.of(proto, shapes, shapes.get(weights, ()))
    flops = onnx_counts.flops(node)
    constants = {*proto.input} & roots.keys()
    return GraphNode(
        op,
        flops,
        weights=sum(math.prod(shapes.get(name, (0,))) for name in constants) if flops else 0,
        layer=onnx_counts.layer_name(roots.get(weights, "")),
        channels=onnx_counts.channels(node),
    )
