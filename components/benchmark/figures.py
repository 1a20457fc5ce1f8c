"""From raw latencies to the figures of each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.benchmark.statistics import quantile, rate, ratio_of_quantiles, samples_needed, wilson
from components.measurements import EngineFigures, Interval, PairedAccuracy, Throughput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from components.benchmark.protocol import Latencies

LEVELS = {"latency_ms_p50": 0.5, "latency_ms_p90": 0.9, "latency_ms_p99": 0.99}


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
    paired: Mapping[str, PairedAccuracy],
    batch_sizes: tuple[int, ...],
    reference: str,
    fastest_fp32: str,
    launches: Sequence[int] = (),
) -> dict[str, EngineFigures]:
    """The figures of every engine, built or not. paired: of each measured engine but the reference.

    launches: how many rounds each launch of the engines had, in order; see `statistics`.
    """
    timed = timings(
        latencies,
        batch_sizes=batch_sizes,
        reference=reference,
        fastest_fp32=fastest_fp32,
        launches=launches,
    )
    described = {}
    for name, engine in engines.items():
        spec = engine.spec
        measured: dict[str, Any] = {}
        if name in timed:
            measured = {
                "accuracy_top1": wilson(spec.accuracy_top1, data.splits["test"].rows),
                "paired": paired.get(name),
                **timed[name],
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


def timings(
    latencies: Latencies,
    *,
    batch_sizes: tuple[int, ...],
    reference: str,
    fastest_fp32: str,
    launches: Sequence[int] = (),
) -> dict[str, dict[str, Any]]:
    """What the latencies alone say of each engine, as fields of `EngineFigures`.

    fastest_fp32 is empty where there is none.
    """
    at_1 = {name: of_batch[1] for name, of_batch in latencies.items()}

    def speedup(slower: str, faster: str) -> Interval:
        return ratio_of_quantiles(at_1[slower], at_1[faster], LEVELS["latency_ms_p50"], launches)

    return {
        name: {
            **_percentiles(at_1[name], launches),
            "throughput": tuple(
                Throughput(batch=batch, images_per_s=rate(batch, of_batch[batch] / 1e3, launches))
                for batch in batch_sizes
            ),
            "speedup_vs_reference": speedup(reference, name),
            "speedup_vs_best_fp32": speedup(fastest_fp32, name) if fastest_fp32 else None,
        }
        for name, of_batch in latencies.items()
    }


def _percentiles(latency_ms: NDArray[np.float64], launches: Sequence[int]) -> dict[str, Any]:
    """The percentiles that have enough samples, why the others are missing, and the spread of the rounds."""
    quoted: dict[str, Interval] = {}
    unquoted = {}
    low = 0.0
    for figure, level in LEVELS.items():
        needed = samples_needed(level)
        if latency_ms.size < needed:
            unquoted[figure] = f"{latency_ms.size} of {needed} samples"
            continue
        found = quantile(latency_ms, level, launches)
        low = max(low, found.low)  # p90 is no less than p50, so what bounds that from below bounds it too
        quoted[figure] = found.model_copy(update={"low": low})
    medians = np.median(latency_ms, axis=1)
    spread = float(np.ptp(medians) / np.median(latency_ms))
    return {**quoted, "samples": latency_ms.size, "unquoted": unquoted, "round_spread": spread}
