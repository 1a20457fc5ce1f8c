"""TensorRT's own profiler and inspector on an engine: its layers, what was fused into each, their times.

The profiler gives the time of a layer on the GPU, between two CUDA events. The inspector gives the layers'
types, tensors and kernels, and names the nodes of the ONNX graph that were fused into each; FLOPs and weights
are counted on those nodes. Both formats are those of NVIDIA's documentation of TensorRT 10 and 11.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.components.diagnose import onnx_nodes
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Profile, requests_within, typical_us
from hpml.components.diagnose.onnx_nodes import Feeds, GraphNode
from hpml.components.diagnose.profilers.fused_layers import (
    ITEMSIZE,
    FusedLayer,
    Tensor,
    listed,
    profile_of,
)
from hpml.core.errors import StageFailed

if TYPE_CHECKING:
    from hpml.targets.tensorrt_engine import PlanSession

_WARMUP = 10
_LEAST_REQUESTS = 10

Reports = Sequence[tuple[str, float]]  # layers of one inference in the order they ran, and milliseconds


def profile(
    session: PlanSession, graph: Path, requests: Sequence[Feeds], *, config: DiagnoseConfig
) -> Profile:
    """The layers of a plan, one of `requests` after the other. graph: the ONNX file it was compiled from."""
    begun_s = time.perf_counter()
    for _ in range(_WARMUP):
        session.run(requests[0])
    request_ms = 1e3 * (time.perf_counter() - begun_s) / _WARMUP
    count = requests_within(config.seconds, request_ms, least=_LEAST_REQUESTS, most=config.requests)
    inferences, inspected = session.profiled(requests, count=_WARMUP + count)
    return layers_of(inferences[_WARMUP:], inspected, onnx_nodes.read(graph, requests[0]))


# ---------------------------------------------------------------------------------- what the inspector tells


_OTHERWISE_CALLED = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "uint8": "int8"}
_KIND = re.compile(rf"\b({'|'.join([*ITEMSIZE, *_OTHERWISE_CALLED])})\b", re.IGNORECASE)
_ONNX_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f\[\s]|$)")


def engine_layers(inspected: str) -> tuple[FusedLayer, ...]:
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


def _engine_layer(entry: Mapping[str, Any]) -> FusedLayer:
    return FusedLayer(
        name=entry["Name"],
        type=entry["LayerType"],
        inputs=_tensors(entry.get("Inputs", ())),
        outputs=_tensors(entry.get("Outputs", ())),
        nodes=tuple(_ONNX_NODE.findall(entry.get("Metadata", ""))),
        kernel=entry.get("TacticName", ""),
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


def layers_of(inferences: Sequence[Reports], inspected: str, nodes: Mapping[str, GraphNode]) -> Profile:
    """The profile that some inferences, the inspector's JSON, and the ONNX graph's nodes make together."""
    known = _by_name_and_turn([(layer.name, layer) for layer in engine_layers(inspected)])
    timed = [
        replace(known.get(key, FusedLayer(key[0], "unknown")), time_us=time_us)
        for key, time_us in _times_us(inferences).items()
        if time_us  # else TensorRT has nothing left to do there
    ]
    unknown = [one.name for one in timed if one.type == "unknown"]
    what = "TensorRT timed layers of which its inspector tells nothing"
    return profile_of(timed, nodes, [listed(what, unknown)] if unknown else [])


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
