"""The figures of a published measurement, computed once more from its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from components.artifacts import Artifact
from components.benchmark.figures import timings
from components.errors import StageFailed
from components.measurements import MeasurementsSpec

if TYPE_CHECKING:
    from components.benchmark.protocol import Latencies


def reanalyse(measured: Artifact[MeasurementsSpec]) -> MeasurementsSpec:
    """`measured` with all that `samples.npz` alone decides computed again: percentiles, rates and speed-ups.

    Raises StageFailed if a measured engine's samples are not there.
    """
    spec = measured.spec
    batches = {
        name: tuple(item.batch for item in engine.throughput)
        for name, engine in spec.engines.items()
        if engine.status == "measured"
    }
    if not batches:
        return spec
    timed = timings(
        _latencies(measured, batches),
        batch_sizes=batches[spec.reference],
        reference=spec.reference,
        fastest_fp32=spec.best_fp32,
        launches=spec.rounds_of_launches,
    )
    again = {name: engine.model_copy(update=timed.get(name, {})) for name, engine in spec.engines.items()}
    return spec.model_copy(update={"engines": again})


def _latencies(measured: Artifact[MeasurementsSpec], batches: dict[str, tuple[int, ...]]) -> Latencies:
    file = measured.file("samples.npz")
    try:
        with np.load(file, allow_pickle=False) as samples:
            return {
                name: {batch: samples[f"{name}@{batch}"] for batch in {1, *of_engine}}
                for name, of_engine in batches.items()
            }
    except (KeyError, ValueError, OSError) as error:
        raise StageFailed(
            f"{file} does not hold the samples of every measured engine", why=str(error)
        ) from None
