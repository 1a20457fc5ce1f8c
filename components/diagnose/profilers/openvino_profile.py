"""OpenVINO's own profile of an engine: the layers of its runtime's graph, and what was fused into each.

It counts the time of a layer in whole microseconds and tells their mean since the graph was compiled. So the
graph is compiled several times, and what one disturbed compilation says does not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from hpml.components.diagnose import onnx_nodes
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Profile, requests_within, too_short, typical_us
from hpml.components.diagnose.onnx_nodes import Feeds
from hpml.components.diagnose.profilers.fused_layers import FusedLayer, Tensor, profile_of

if TYPE_CHECKING:
    from hpml.targets.openvino import OpenVinoSession, RuntimeLayer

_WARMUP = 10
_LEAST_REQUESTS = 10
_COMPILATIONS = 5
_KINDS = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "u8": "int8",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
}


def profile(
    session: OpenVinoSession,
    file: Path,
    requests: Sequence[Feeds],
    *,
    config: DiagnoseConfig,
) -> Profile:
    """The layers of an engine, one of `requests` after the other. file: the graph it was compiled from."""
    begun_s = time.perf_counter()
    for _ in range(_WARMUP):
        session.run(requests[0])
    request_ms = 1e3 * (time.perf_counter() - begun_s) / _WARMUP
    count = requests_within(
        config.seconds / _COMPILATIONS, request_ms, least=_LEAST_REQUESTS, most=config.requests
    )
    compilations = [session.profiled(requests, count=count) for _ in range(_COMPILATIONS)]
    return layers_of(compilations, file, requests[0])


def layers_of(compilations: list[list[RuntimeLayer]], file: Path, request: Feeds) -> Profile:
    """The profile that what was told of some compilations and the nodes of the ONNX graph make together."""
    times_us: dict[str, list[float]] = defaultdict(list)
    for layers in compilations:
        for layer in layers:
            if layer.time_us is not None:
                times_us[layer.name].append(layer.time_us)
    described = {layer.name: layer for layer in compilations[0]}
    named = _names(file)
    timed = [
        _fused(described[name], described, named, typical_us(times))
        for name, times in times_us.items()
        if name in described
    ]
    notes = too_short([layer.time_us for layer in timed], "OpenVINO")
    return profile_of(timed, onnx_nodes.read(file, request), notes)


def _names(file: Path) -> dict[str, str]:
    """The node that each name means: its own, or that of a tensor which it gives, as OpenVINO calls some."""
    nodes = onnx.load(file, load_external_data=False).graph.node
    return {output: node.name for node in nodes for output in node.output} | {
        node.name: node.name for node in nodes
    }


def _fused(
    layer: RuntimeLayer, described: dict[str, RuntimeLayer], named: dict[str, str], time_us: float
) -> FusedLayer:
    # What its transformations add to a name stands behind a slash: "node_linear/WithoutBiases".
    told = [name if name in named else name.partition("/")[0] for name in layer.nodes]
    return FusedLayer(
        name=layer.name,
        type=layer.type,
        inputs=tuple(_tensor(described[name]) for name in layer.inputs if name in described),
        outputs=(_tensor(layer),),
        nodes=tuple(dict.fromkeys(named[name] for name in told if name in named)),
        kernel=layer.kernel,
        time_us=time_us,
    )


def _tensor(layer: RuntimeLayer) -> Tensor:
    """What `layer` gives."""
    kind = _KINDS.get(layer.precision, "")
    return Tensor(layer.name, layer.shape, kind, f"{layer.layout} {layer.precision}")
