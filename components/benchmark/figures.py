"""From raw latencies to the figures of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.benchmark.statistics import (
    interval,
    quantiles,
    rates,
    round_weights,
    samples_needed,
    wilson,
)
from components.measurements import EngineFigures, Interval, Throughput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from components.benchmark.protocol import Latencies

LEVELS = {"latency_ms_p50": 0.5, "latency_ms_p90": 0.9, "latency_ms_p99": 0.99}

Draws = dict[str, dict[str, "NDArray[np.float64]"]]  # engine -> percentile -> bootstrap draws


def best_fp32(engines: Mapping[str, Artifact[EngineSpec]], latencies: Latencies, *, reference: str) -> str:
    """The engine of the unmodified network in fp32, other than the reference, with the least p50.

    Empty if there is none.
    """
    candidates = [
        name
        for name in latencies
        if name != reference and engines[name].spec.precision == "fp32" and not engines[name].spec.methods
    ]
    return min(candidates, key=lambda name: float(np.median(latencies[name][1])), default="")


def figures(
    engines: Mapping[str, Artifact[EngineSpec]],
    latencies: Latencies,
    *,
    data: DatasetSpec,
    batch_sizes: tuple[int, ...],
    reference: str,
    fastest_fp32: str,
    seed: int,
) -> dict[str, EngineFigures]:
    """The figures of every engine, built or not."""
    rounds = len(latencies[reference][1])
    weights = round_weights(rounds, seed=seed)
    draws: Draws = {
        name: dict(zip(LEVELS, quantiles(of_batch[1], weights, tuple(LEVELS.values())), strict=True))
        for name, of_batch in latencies.items()
    }
    described = {}
    for name, engine in engines.items():
        spec = engine.spec
        measured: dict[str, Any] = {}
        if name in latencies:
            measured = {
                "accuracy_top1": wilson(spec.accuracy_top1, data.splits["test"].rows),
                **_percentiles(draws[name], latencies[name][1]),
                "throughput": _throughput(latencies[name], batch_sizes, weights),
                "speedup_vs_reference": _ratio(draws, reference, name, rounds),
                "speedup_vs_best_fp32": _ratio(draws, fastest_fp32, name, rounds),
            }
        described[name] = EngineFigures(
            status="measured" if measured else "not built",
            reason=spec.reason,
            target=str(spec.target["target"]),
            precision=spec.precision,
            methods=spec.methods,
            size_bytes=spec.size_bytes,
            parameters=spec.parameters,
            macs=spec.macs,
            **measured,
        )
    return described


def _percentiles(draws: dict[str, NDArray[np.float64]], latency_ms: NDArray[np.float64]) -> dict[str, Any]:
    """The percentiles that have enough samples, why the others are missing, and the spread of the rounds."""
    quoted: dict[str, Interval] = {}
    unquoted = {}
    low = 0.0
    for figure, level in LEVELS.items():
        needed = samples_needed(level)
        if latency_ms.size < needed:
            unquoted[figure] = f"{latency_ms.size} of {needed} samples"
            continue
        found = interval(draws[figure], rounds=len(latency_ms))
        low = max(low, found.low)  # p99 is no less than p90, so what bounds that from below bounds it too
        quoted[figure] = found.model_copy(update={"low": low})
    medians = np.median(latency_ms, axis=1)
    spread = float(np.ptp(medians) / np.median(latency_ms))
    return {**quoted, "samples": latency_ms.size, "unquoted": unquoted, "round_spread": spread}


def _throughput(
    of_batch: dict[int, NDArray[np.float64]], batch_sizes: tuple[int, ...], weights: NDArray[np.int64]
) -> tuple[Throughput, ...]:
    return tuple(
        Throughput(
            batch=batch,
            images_per_s=interval(rates(batch, of_batch[batch] / 1e3, weights), rounds=weights.shape[1]),
        )
        for batch in batch_sizes
    )


def _ratio(draws: Draws, slower: str, faster: str, rounds: int) -> Interval | None:
    """How many times faster at p50 `faster` is than `slower`; None without the latter."""
    if slower not in draws:
        return None
    return interval(draws[slower]["latency_ms_p50"] / draws[faster]["latency_ms_p50"], rounds=rounds)
