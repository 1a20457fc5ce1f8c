"""Time all engines of a run together: interleaved rounds, each engine in its own process, with intervals."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.contract import Config, Output, Result
from components.hardware import usable_cpus
from components.measurements import MeasurementsSpec


class BenchmarkConfig(Config):
    """How the engines are timed. The defaults give each engine 1,000 samples at batch 1."""

    reference: str = Field(default="fp32/eager", min_length=1)  # the engine that speed-ups refer to
    rounds: int = Field(default=20, ge=5, le=10_000)  # in each, every engine is timed once, in random order
    requests_per_round: int = Field(default=50, ge=3, le=100_000)  # at batch 1; p99 needs 662 in all rounds
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 8, 32)  # throughput is measured here
    images_per_round: int = Field(default=128, ge=1, le=1_000_000)  # at each batch size above 1, at least
    warmup_requests: int = Field(default=20, ge=1, le=10_000)  # at each batch size, before the first round
    threads: int | None = Field(default=None, ge=1, le=1024)  # of each engine; null: all that the step has
    time_budget_s: float = Field(default=150.0, gt=0)  # no new round after it, once 5 are done
    golden_tolerance: float = Field(default=0.02, gt=0, le=1)  # of a logit, as a share of the largest
    seed: int = Field(default=0, ge=0)  # of the order of the engines, the choice of images, the bootstrap

    def unmet(self) -> str:
        """Why this machine cannot pin so many threads; empty if it can."""
        if self.threads and self.threads > usable_cpus():
            return f"benchmark.threads is {self.threads}, this machine has {usable_cpus()} CPUs to use"
        return ""


def run(
    config: BenchmarkConfig,
    *,
    engines: dict[str, Artifact[EngineSpec]],
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[MeasurementsSpec]:
    """Time `engines` on test images of `data`.

    Raises StageFailed that names the engine whose process crashed or whose golden outputs it does not
    reproduce, and ConfigInvalid where the reference is not among the engines.
    """
    from components.benchmark.measure import measure

    return measure(config, engines, data, out)
