"""TensorRT's own profiler and inspector on an engine: its layers, what was fused into each, their times.

The profiler gives the time of a layer on the GPU, between two CUDA events. The inspector gives the layers'
types, tensors and kernels, and names the nodes of the ONNX graph that were fused into each; FLOPs and weights
are counted on those nodes. Both formats are those of NVIDIA's documentation of TensorRT 10 and 11.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.model_input import InputSpec
from hpml.components.diagnose import onnx_nodes
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Layer, Precision, Profile, Role, requests_within, typical_us
from hpml.components.diagnose.onnx_nodes import GraphNode
from hpml.core.errors import StageFailed

if TYPE_CHECKING:
    from hpml.targets.tensorrt_engine import PlanSession

_WARMUP = 10
_LEAST_REQUESTS = 10
_UNNAMED_WORTH_A_NOTE = 0.01  # of the operations
_NAMED = 4  # in a note

Images = NDArray[np.float32]  # (images, channels, height, width)
Reports = Sequence[tuple[str, float]]  # layers of one inference in the order they ran, and milliseconds


def profile(
    session: PlanSession, graph: Path, spec: InputSpec, x_nchw: Images, *, config: DiagnoseConfig
) -> Profile:
    """The layers of a plan, one image of `x_nchw` a request. graph: the ONNX file it was compiled from."""
    begun_s = time.perf_counter()
    for _ in range(_WARMUP):
        session.predict(x_nchw[:1])
    request_ms = 1e3 * (time.perf_counter() - begun_s) / _WARMUP
    requests = requests_within(config.seconds, request_ms, least=_LEAST_REQUESTS, most=config.requests)
    inferences, inspected = session.profiled(x_nchw, requests=_WARMUP + requests)
    return layers_of(inferences[_WARMUP:], inspected, onnx_nodes.read(graph, spec))


# ---------------------------------------------------------------------------------- what the inspector tells


@dataclass(frozen=True)
class Tensor:
    """An input or output of a layer. kind: as in "fp16"; empty if it is none that we know."""

    name: str
    shape: tuple[int, ...]
    kind: str
    format: str  # TensorRT's words for its type and layout

    @property
    def bytes(self) -> int:
        """Without what a layout fills channels up with; a dimension of -1 is the batch, which is 1."""
        return math.prod(max(1, size) for size in self.shape) * _ITEMSIZE.get(self.kind, 4)


@dataclass(frozen=True)
class EngineLayer:
    """A layer of the plan. nodes: those of the ONNX graph that it names. time_us: once it was timed."""

    name: str
    type: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    nodes: tuple[str, ...] = ()
    tactic: str = ""
    time_us: float = 0.0

    @property
    def formats(self) -> str:
        """In words."""
        fed, given = (", ".join(tensor.format for tensor in side) for side in (self.inputs, self.outputs))
        return f"{fed} -> {given}" if fed or given else ""


_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1}
_OTHERWISE_CALLED = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "uint8": "int8"}
_KIND = re.compile(rf"\b({'|'.join([*_ITEMSIZE, *_OTHERWISE_CALLED])})\b", re.IGNORECASE)
_ONNX_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f\[\s]|$)")


def engine_layers(inspected: str) -> tuple[EngineLayer, ...]:
    """The layers in the inspector's JSON, in the order they run.

    Raises StageFailed if the plan was built without their details.
    """
    entries = json.loads(inspected, strict=False)["Layers"]  # its separators are control characters
    if not all(isinstance(entry, dict) for entry in entries):
        raise StageFailed(
            "the TensorRT plan holds no details of its layers",
            why="it was built with another profiling verbosity than DETAILED",
            fix="export it again",
        )
    return tuple(_engine_layer(entry) for entry in entries)


def _engine_layer(entry: Mapping[str, Any]) -> EngineLayer:
    return EngineLayer(
        name=entry["Name"],
        type=entry["LayerType"],
        inputs=_tensors(entry.get("Inputs", ())),
        outputs=_tensors(entry.get("Outputs", ())),
        nodes=tuple(_ONNX_NODE.findall(entry.get("Metadata", ""))),
        tactic=entry.get("TacticName", ""),
    )


def _tensors(entries: Sequence[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    """Those in the GPU's memory."""
    return tuple(_tensor(entry) for entry in entries if entry.get("Location", "Device") == "Device")


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    # One field up to TensorRT 10, "Channel major FP16 format where channel % 8 == 0"; then two.
    layout, kind = entry.get("Format", ""), entry.get("Datatype") or entry.get("Format/Datatype", "")
    found = _KIND.search(kind)
    named = found.group().lower() if found else ""
    return Tensor(
        entry.get("Name", ""),
        tuple(entry.get("Dimensions", ())),
        _OTHERWISE_CALLED.get(named, named),
        f"{layout} {kind}".strip(),
    )


# -------------------------------------------------------------------------------------- times, and what ran


# What only copies. Its metadata names the nodes whose tensors it copies.
_COPIES = frozenset({"Reformat", "Shuffle", "NoOp"})
_PRODUCT = re.compile(r"conv|gemm|matmul|matrixmultiply|mha", re.IGNORECASE)


def layers_of(inferences: Sequence[Reports], inspected: str, nodes: Mapping[str, GraphNode]) -> Profile:
    """The profile that some inferences, the inspector's JSON, and the ONNX graph's nodes make together."""
    known = _by_name_and_turn([(layer.name, layer) for layer in engine_layers(inspected)])
    timed = [
        replace(known.get(key, EngineLayer(key[0], "unknown")), time_us=time_us)
        for key, time_us in _times_us(inferences).items()
        if time_us  # else TensorRT has nothing left to do there
    ]
    owned = _owned(timed, nodes)
    layers = tuple(_layer(one, [nodes[name] for name in owned[index]]) for index, one in enumerate(timed))
    return Profile(layers, notes=tuple(_notes(timed, layers, nodes)))


def _by_name_and_turn(named: Sequence[tuple[str, Any]]) -> dict[tuple[str, int], Any]:
    """Layers may share a name: each by its name and how many of that name came before."""
    turns: dict[str, int] = defaultdict(int)
    found = {}
    for name, value in named:
        found[name, turns[name]] = value
        turns[name] += 1
    return found


def _times_us(inferences: Sequence[Reports]) -> dict[tuple[str, int], float]:
    """The typical time of each layer, in the order they ran."""
    durations_us: dict[tuple[str, int], list[float]] = defaultdict(list)
    for reports in inferences:
        for key, duration_ms in _by_name_and_turn(reports).items():
            durations_us[key].append(1e3 * duration_ms)
    return {key: typical_us(times) for key, times in durations_us.items()}


def _owned(timed: Sequence[EngineLayer], nodes: Mapping[str, GraphNode]) -> dict[int, list[str]]:
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


def _is_product(layer: EngineLayer) -> bool:
    return _PRODUCT.search(f"{layer.type} {layer.tactic}") is not None


def _layer(timed: EngineLayer, nodes: Sequence[GraphNode]) -> Layer:
    products = [node for node in nodes if node.is_product]
    only = products[0] if len(products) == 1 else GraphNode("", 0)
    flops = sum(node.flops or 0 for node in nodes)
    precision = _precision(timed, multiplies=bool(products))
    return Layer(
        name=only.layer or timed.name,
        op=timed.type,
        precision=precision,
        flops=flops,
        weight_bytes=sum(node.weights for node in nodes) * _ITEMSIZE[precision],
        activation_bytes=sum(tensor.bytes for tensor in (*timed.inputs, *timed.outputs)),
        time_us=timed.time_us,
        channels=only.channels,
        role="" if flops else _role(timed),
        nodes=timed.nodes,
        formats=timed.formats,
        kernel=timed.tactic,
    )


def _precision(layer: EngineLayer, *, multiplies: bool) -> Precision:
    """A product multiplies what comes in; all else is as wide as what it gives."""
    tensors = layer.inputs if multiplies else layer.outputs
    kinds: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "int8": "int8"}
    return kinds.get(tensors[0].kind, "fp32") if tensors else "fp32"


def _role(layer: EngineLayer) -> Role:
    """Of a layer without arithmetic."""
    fed, given = ({tensor.kind for tensor in side} for side in (layer.inputs, layer.outputs))
    if ("int8" in fed) != ("int8" in given):
        return "conversion"
    return "layout" if layer.type in _COPIES else ""


def _notes(
    timed: Sequence[EngineLayer], layers: Sequence[Layer], nodes: Mapping[str, GraphNode]
) -> list[str]:
    """What could not be counted."""
    tensors = {tensor for one in timed for tensor in (*one.inputs, *one.outputs)}
    uncounted = {
        "TensorRT timed layers of which its inspector tells nothing": [
            one.name for one in timed if one.type == "unknown"
        ],
        "tensors of unknown types count 4 bytes an element": sorted(
            tensor.name for tensor in tensors if not tensor.kind
        ),
        "operations without known shapes are not counted": [
            name for name, node in nodes.items() if node.flops is None
        ],
    }
    notes = [
        f"{what} ({len(names)}): {', '.join(names[:_NAMED])}" for what, names in uncounted.items() if names
    ]
    flops = sum(node.flops or 0 for node in nodes.values())
    unnamed = 1 - sum(layer.flops for layer in layers) / flops if flops else 0.0
    if unnamed > _UNNAMED_WORTH_A_NOTE:
        notes.append(f"{100 * unnamed:.0f} % of the operations are in nodes that no timed layer names")
    return notes
