"""From the rounds to the figures of each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, Throughput
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.paired import (
    MIN_ROUNDS,
    Batch1Analysis,
    counterpart,
    counts,
    reference_of,
    undisturbed_rows,
)
from hpml.measuring.resources import LaunchRecord, resource_figures
from hpml.measuring.rounds import Rounds
from hpml.measuring.statistics import quantile, rate, samples_needed

LEVELS = {"latency_ms_p50": 0.5, "latency_ms_p90": 0.9, "latency_ms_p99": 0.99}


def best_fp32(
    engines: Mapping[str, Artifact[EngineSpec]], rounds: Rounds, names: Sequence[str], *, reference: str
) -> str:
    """The engine of the unmodified network in fp32, other than the reference, with the least p50.

    Empty if there is none, or no round.
    """
    candidates = [
        name
        for name in names
        if name in engines
        and name != reference
        and engines[name].spec.precision == "fp32"
        and not engines[name].spec.methods
    ]
    if not rounds.at(1):
        return ""
    p50_ms = Batch1Analysis.of(rounds, candidates).p50_ms
    return min(candidates, key=lambda name: float(np.median(p50_ms[name])), default="")


def engine_figures(
    known: Mapping[str, Any], timed: Mapping[str, Any], told: LaunchRecord, config: BenchmarkConfig, busy: str
) -> EngineFigures:
    """The figures of an engine that was to be timed.

    known: fields of them that need no measuring. timed: what `timings` has of it. busy: why there is no
    latency, in words.
    """
    is_measured = "latency_ms_p50" in timed
    return EngineFigures.model_validate(
        {
            "status": "measured" if is_measured else "not measured",
            "reason": "" if is_measured else busy,
            **known,
            **timed,
            "settings": told.settings,
            "resources": resource_figures(told, timed["throughput"], config.price_per_hour),
            "scenarios": told.scenarios,
            "concurrency": told.concurrency,
        }
    )


def timings(
    rounds: Rounds, config: BenchmarkConfig, names: Sequence[str], *, fastest_fp32: str, busy: str
) -> dict[str, dict[str, Any]]:
    """What the rounds alone say of each engine, and of each operation of it, as fields of `EngineFigures`.

    fastest_fp32 is empty where there is none. busy: why there are not enough undisturbed rounds, in words.
    """
    batches = config.timed_batches
    latencies = rounds.latencies(names, batches)
    at_1 = Batch1Analysis.of(rounds, names, precision=config.precision)
    found = {}
    for name in names:
        reference = counterpart(reference_of(config, names), name, names)
        best = counterpart(fastest_fp32, name, names) if fastest_fp32 else ""
        ratios = {"speedup_vs_reference": at_1.ratio(name, reference)}
        if best:
            ratios["speedup_vs_best_fp32"] = at_1.ratio(name, best)
        percentiles = _percentiles(latencies[name][1], at_1.launches, busy)
        if "latency_ms_p50" in percentiles:  # else nothing is known
            percentiles["unquoted"] |= {key: one.reason for key, one in ratios.items() if not one.speedup}
        found[name] = {
            **percentiles,
            **_throughputs(latencies[name], [b for b in batches if b in config.batch_sizes], rounds),
            **{key: one.speedup for key, one in ratios.items()},
            "states": at_1.figures(name, reference, best),
        }
    return found


def _throughputs(
    latencies: Mapping[int, NDArray[np.float64]], batches: Sequence[int], rounds: Rounds
) -> dict[str, Any]:
    found = []
    for batch in batches:
        launch = np.array([one.launch for one in rounds.at(batch)], np.int64)
        clean = np.isfinite(latencies[batch]).all(axis=1)
        if clean.sum() >= MIN_ROUNDS:
            rows_per_s = rate(batch, latencies[batch][clean] / 1e3, counts(launch[clean]))
            found.append(Throughput(batch=batch, rows_per_s=rows_per_s))
    return {"throughput": tuple(found)}


def _percentiles(latency_ms: NDArray[np.float64], launches: Sequence[int], busy: str) -> dict[str, Any]:
    """The percentiles that have enough samples, why the others are missing, and the spread of the rounds."""
    samples = int(np.isfinite(latency_ms).sum())
    if len(latency_ms) < MIN_ROUNDS:
        return {"samples": samples, "unquoted": dict.fromkeys(LEVELS, busy)}
    quoted: dict[str, Interval] = {}
    unquoted = {}
    low = 0.0
    whole = undisturbed_rows(latency_ms)
    for figure, level in LEVELS.items():
        # One half of the requests is beyond p50 whether or not some of the longer ones were disturbed.
        counted, of_launches = (latency_ms, launches) if level == 0.5 else (whole, ())
        needed, there = samples_needed(level), int(np.isfinite(counted).sum())
        if there < needed or len(counted) < MIN_ROUNDS:
            unquoted[figure] = f"{there} of {needed} samples" if len(whole) == len(latency_ms) else busy
            continue
        found = quantile(counted, level, of_launches)
        low = max(low, found.low)  # p90 is no less than p50, so what bounds that from below bounds it too
        quoted[figure] = Interval(low=low, value=max(found.value, low), high=max(found.high, low))
    medians = np.nanmedian(latency_ms, axis=1)
    spread = float(np.ptp(medians) / np.nanmedian(latency_ms))
    return {**quoted, "samples": samples, "unquoted": unquoted, "round_spread": spread}
