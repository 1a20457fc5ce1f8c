"""ONNX Runtime's own profiler on an engine: the graph that it really runs, and the time of each node.

What it runs is not the file: it fuses, quantizes and lays out anew. So it also writes that graph, and FLOPs
and bytes are counted there, from the shapes that the profiler saw.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from hpml.components.diagnose import onnx_counts
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Layer, Precision, Profile, requests_within, too_short, typical_us
from hpml.components.diagnose.onnx_counts import Node, Shape
from hpml.core.errors import disk_full_explained
from hpml.targets.onnx_session import PROVIDERS, Feeds, OnnxSession, latencies_ms, session_options

_EVENT = "_kernel_time"
_EMPTY_KERNELS = 16
_WARMUP = 5
_LEAST_REQUESTS = 10
_MOST_EVENTS = 8_000  # each is a kilobyte of JSON
_ITEMSIZE = {"float": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1, "bool": 1, "int32": 4}
_LARGE_ITEMSIZE = 8  # int64, double

Requests = Sequence[Feeds]  # each with a batch of 1


def profile(file: Path, cycled: Requests, *, threads: int, config: DiagnoseConfig, scratch: Path) -> Profile:
    """The layers of the ONNX file on the CPU; the requests are those of `cycled`, again and again."""
    one, all_ = _threads_compared(file, cycled, threads)
    graph = onnx.load(file)
    most = min(config.requests, max(_LEAST_REQUESTS, _MOST_EVENTS // max(1, len(graph.graph.node))))
    requests = requests_within(config.seconds, all_ / 1e3, least=_LEAST_REQUESTS, most=most)
    # ONNX Runtime does not say that a profile or a graph was cut short.
    with tempfile.TemporaryDirectory(dir=scratch) as folder, disk_full_explained(folder):
        place = Path(folder)
        named = place / "named.onnx"
        _name_all_nodes(graph)
        onnx.save(graph, named)
        nodes = _nodes_timed(named, cycled, requests, threads, place)
        nodes = _without_profiler(nodes, threads, place)
        layers = _layers(_optimized(place / "run.onnx"), _unblocked(named, place), nodes)
        signed_us, unsigned_us = _signs_compared(file, graph, cycled, place)
    notes = too_short([node.time_us for node in nodes.values()], "ONNX Runtime")
    return Profile(layers, one, all_, signed_us, unsigned_us, (*notes, *_uncounted(layers)))


def _uncounted(layers: Sequence[Layer]) -> Iterator[str]:
    """A note on the nodes whose operations and bytes are more than what is counted."""
    found = dict.fromkeys(
        f"{layer.name} ({layer.op})" for layer in layers if onnx_counts.has_own_graph(layer.op)
    )
    if found:
        yield (
            f"{', '.join(found)}: what the graph in it computes is not counted, so the share of the peak is "
            "too small"
        )


# ------------------------------------------------------------------------------------- running with a profile


def _name_all_nodes(graph: onnx.ModelProto) -> None:
    """Give each node a name of its own: the profiler tells nodes apart by it."""
    seen: set[str] = set()
    for index, node in enumerate(graph.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_{index}"
        seen.add(node.name)


Shapes = list[tuple[str, Shape]]  # element type as ONNX Runtime spells it, and shape


@dataclass(frozen=True)
class _Timed:
    """What the profiler saw of a node: its inputs and outputs, and its typical time."""

    fed: Shapes
    given: Shapes
    time_us: float


def _nodes_timed(file: Path, cycled: Requests, requests: int, threads: int, place: Path) -> dict[str, _Timed]:
    options = session_options(threads)
    options.enable_profiling = True
    options.profile_file_prefix = str(place / "profile")
    options.optimized_model_filepath = str(place / "run.onnx")
    session = onnxruntime.InferenceSession(file, options, providers=PROVIDERS["cpu"])
    for index in range(_WARMUP + requests):
        session.run(None, cycled[index % len(cycled)])
    events: dict[str, list[Any]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_bytes()):
        if event["cat"] == "Node" and event["name"].endswith(_EVENT):
            events[event["name"].removesuffix(_EVENT)].append(event)
    return {node: _timed(of_node) for node, of_node in events.items()}


def _timed(events: list[Any]) -> _Timed:
    fed, given = (
        [(kind, tuple(shape)) for entry in events[-1]["args"][side] for kind, shape in entry.items()]
        for side in ("input_type_shape", "output_type_shape")
    )
    return _Timed(fed, given, typical_us([event["dur"] for event in events[_WARMUP:]]))


def _without_profiler(nodes: dict[str, _Timed], threads: int, place: Path) -> dict[str, _Timed]:
    """The same less the time that the profiler adds to a kernel, a few microseconds.

    That is measured on kernels with nothing to do: a chain of negations of one number.
    """
    links = [f"link_{index}" for index in range(_EMPTY_KERNELS + 1)]
    chain = [helper.make_node("Neg", [a], [b], name=b) for a, b in pairwise(links)]
    first, *_, last = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch"]) for name in links)
    graph = helper.make_graph(chain, "empty kernels", [first], [last])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    empty = place / "empty"
    empty.mkdir()
    onnx.save(model, empty / "kernels.onnx")
    request = {links[0]: np.zeros(1, np.float32)}
    kernels = _nodes_timed(empty / "kernels.onnx", [request], 50, threads, empty)
    cost_us = min(kernel.time_us for kernel in kernels.values())
    return {name: replace(node, time_us=max(0.0, node.time_us - cost_us)) for name, node in nodes.items()}


# ----------------------------------------------------------------------------------------- counting its graph


@dataclass(frozen=True)
class _Graph:
    """The nodes of a graph by name, and the shape and bytes of each constant."""

    nodes: dict[str, onnx.NodeProto]
    constants: dict[str, tuple[Shape, int]]


def _optimized(file: Path) -> _Graph:
    graph = onnx.load(file).graph
    constants = {
        tensor.name: (
            tuple(tensor.dims),
            math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize,
        )
        for tensor in graph.initializer
    }
    return _Graph({node.name: node for node in graph.node}, constants)


def _unblocked(file: Path, place: Path) -> dict[str, tuple[str, Shape]]:
    """Name and shape of the weights behind each tensor that a convolution gives, before the blocked layout.

    That layout fills channels up to whole vectors, so its weights have more than the network.
    """
    options = session_options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(place / "unblocked.onnx")
    onnxruntime.InferenceSession(file, options, providers=PROVIDERS["cpu"])
    graph = _optimized(place / "unblocked.onnx")
    return {
        node.output[0]: (name, graph.constants[name][0])
        for node in graph.nodes.values()
        if (name := onnx_counts.weights_of(node)) in graph.constants
    }


def _layers(
    graph: _Graph, unblocked: dict[str, tuple[str, Shape]], nodes: dict[str, _Timed]
) -> tuple[Layer, ...]:
    ran = [
        (graph.nodes[name], timed)
        for name, timed in nodes.items()
        if name in graph.nodes  # else it is inside a loop or a branch, whose own event covers it
    ]
    tensors = {
        tensor: seen
        for proto, timed in ran
        for tensor, seen in zip(filter(None, proto.output), timed.given, strict=False)
    }
    for proto, timed in ran:  # what comes from outside
        given = [name for name in proto.input if name]
        if len(given) == len(timed.fed):
            tensors |= {
                name: seen
                for name, seen in zip(given, timed.fed, strict=True)
                if name not in tensors and name not in graph.constants
            }
    known = {name: shape for name, (shape, _) in graph.constants.items()}
    known |= {name: shape for name, (_, shape) in tensors.items()}
    return tuple(_layer(proto, timed, graph, unblocked, tensors, known) for proto, timed in ran)


def _layer(
    proto: onnx.NodeProto,
    timed: _Timed,
    graph: _Graph,
    unblocked: dict[str, tuple[str, Shape]],
    tensors: dict[str, tuple[str, Shape]],
    shapes: dict[str, Shape],
) -> Layer:
    source = onnx_counts.weights_of(proto)
    weights = (source if source in graph.constants else "", shapes.get(source, ()))
    # The blocked convolution of a tensor is named after it: "relu_nchwc", "relu_nchwc_token_3".
    weights_name, weights_shape = unblocked.get(proto.name.partition("_nchwc")[0], weights)
    node = Node.of(proto, shapes, weights_shape)
    tables = onnx_counts.tables_of(proto)
    moving = [tensors[tensor] for tensor in dict.fromkeys(proto.input) if tensor in tensors.keys() - tables]
    looked_up = [timed.given[0] for tensor in tables if tensor in tensors and timed.given]
    constants = {tensor: graph.constants[tensor][1] for tensor in proto.input if tensor in graph.constants}
    read = {
        tensor: min(size, _bytes(timed.given[:1])) if tensor in tables else size
        for tensor, size in constants.items()
    }
    return Layer(
        name=onnx_counts.layer_name(weights_name) or proto.name,
        op=proto.op_type,
        precision=_precision(proto.op_type, timed.given),
        flops=onnx_counts.flops(node),
        weight_bytes=sum(read.values()),
        activation_bytes=0
        if onnx_counts.is_view(proto.op_type)
        else _bytes([*moving, *looked_up, *timed.given]),
        time_us=timed.time_us,
        channels=onnx_counts.channels(node),
        role=onnx_counts.role(proto.op_type),
    )


def _bytes(tensors: Shapes) -> int:
    return sum(math.prod(shape) * _ITEMSIZE.get(kind, _LARGE_ITEMSIZE) for kind, shape in tensors)


def _precision(op: str, given: Shapes) -> Precision:
    kind = given[0][0] if given else ""
    if onnx_counts.is_quantized(op) or kind in ("int8", "uint8"):
        return "int8"
    return "fp16" if kind == "float16" else "bf16" if kind == "bfloat16" else "fp32"


# ------------------------------------------------------------------------------------------------ comparisons


def _threads_compared(file: Path, cycled: Requests, threads: int) -> tuple[float, float]:
    """Microseconds of a request with one thread, and with `threads` that spin as they do by default.

    Those that spin into the turn of the one leave it a CPU: it is the thread that they wait for.
    """
    sessions = {"one": OnnxSession(file, device="cpu", threads=1)}
    if threads > 1:
        sessions["all"] = OnnxSession(file, device="cpu", threads=threads)
    measured = _in_turns(sessions, cycled[0])
    return measured["one"], measured.get("all", measured["one"])


def _signs_compared(
    file: Path, graph: onnx.ModelProto, cycled: Requests, place: Path
) -> tuple[float | None, float | None]:
    """Microseconds of a request as it is, and with signed activations made unsigned; None if none are."""
    if not _make_unsigned(graph):
        return None, None
    onnx.save(graph, place / "unsigned.onnx")
    files = {"signed": file, "unsigned": place / "unsigned.onnx"}
    sessions = {name: OnnxSession(file, device="cpu", threads=1) for name, file in files.items()}
    measured = _in_turns(sessions, cycled[0])
    return measured["signed"], measured["unsigned"]


def _in_turns(sessions: dict[str, OnnxSession], request: Feeds) -> dict[str, float]:
    """Microseconds of a request to each session, in about a third of a second."""
    once_ms = sum(latencies_ms(sessions, request, rounds=2, requests=1).values())
    rounds = requests_within(0.3, once_ms, least=3, most=200)
    return {name: 1e3 * ms for name, ms in latencies_ms(sessions, request, rounds=rounds, requests=1).items()}


def _make_unsigned(graph: onnx.ModelProto) -> bool:
    """Shift every int8 activation to uint8, which changes no value; returns whether there was any.

    q = x / scale + z in [-128, 127] becomes q + 128 = x / scale + (z + 128) in [0, 255].
    """
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    shifted = set()
    for node in graph.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.input) < 3:
            continue
        zero_point = node.input[2]
        of_signed = zero_point in constants and constants[zero_point].data_type == TensorProto.INT8
        if node.input[0] in constants or not of_signed:  # weights stay as they are
            continue
        node.input[2] = f"{zero_point}_unsigned"
        if zero_point not in shifted:
            shifted.add(zero_point)
            value = numpy_helper.to_array(constants[zero_point]).astype(np.int16) + 128
            graph.graph.initializer.append(numpy_helper.from_array(value.astype(np.uint8), node.input[2]))
    return bool(shifted)
