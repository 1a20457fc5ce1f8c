"""Time all engines of a run together: interleaved rounds, each engine in its own process, with intervals."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.contract import Config, Output, Result
from components.hardware import usable_cpus
from components.measurements import MeasurementsSpec, ScenarioName


class Quiet(Config):
    """When a machine counts as quiet. A slice beyond a limit is dropped and repeated inside the time budget.

    Shares are of the time of the slice; see `components.benchmark.watch` for what each one is.
    """

    max_waited: float = Field(default=0.05, ge=0)  # summed over the engine's threads
    max_stolen: float = Field(default=0.02, ge=0)  # summed over the CPUs
    max_others: float = Field(default=0.25, ge=0, le=1)  # of all CPUs that we may use
    max_slowdown: float = Field(default=0.20, gt=0)  # of the GEMM probe, against the best of the run
    max_round_slowdown: float = Field(
        default=0.05, gt=0
    )  # of every engine at once, against its better rounds
    max_drift: float = Field(default=0.07, gt=0)  # of an engine's p50, from the first round to the last
    max_disagreement: float = Field(default=0.05, gt=0)  # half the width of a speed-up's interval
    enforce: bool = True  # false: count disturbances and drop nothing; the report warns


class BenchmarkConfig(Config):
    """How the engines are timed. The defaults give each engine 4,000 samples at batch 1."""

    reference: str = Field(default="fp32/eager", min_length=1)  # the engine that speed-ups refer to
    rounds: int = Field(default=40, ge=5, le=10_000)  # in each, every engine is timed once, in random order
    launches: int = Field(
        default=5, ge=1, le=100
    )  # fresh processes of each engine, over which rounds are spread
    requests_per_round: int = Field(default=100, ge=3, le=100_000)  # at batch 1; p99 needs 662 in all rounds
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 8, 32)  # throughput is measured here
    images_per_round: int = Field(default=64, ge=1, le=1_000_000)  # at each batch size above 1, at least
    warmup_requests: int = Field(default=20, ge=1, le=10_000)  # at each batch size, after each launch
    scenarios: tuple[ScenarioName, ...] = ("SingleStream", "MultiStream", "Offline", "Server")
    scenario_backend: Literal["ours", "loadgen"] = "ours"  # loadgen: of the package mlcommons-loadgen
    scenario_seconds: float = Field(default=10.0, gt=0)  # that one scenario of one engine may take at most
    server_latency_bound_ms: float = Field(default=15.0, gt=0)  # of p99; MLPerf's for ResNet-50 is 15 ms
    concurrency: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1, 2, 4)  # clients of the closed loop
    price_per_hour: float | None = Field(default=None, gt=0)  # of this machine, in any currency
    threads: int | None = Field(default=None, ge=1, le=1024)  # of each engine; null: all that the step has
    time_budget_s: float = Field(default=90.0, gt=0)  # of the rounds: no new one after it, once 5 are done
    scenario_budget_s: float = Field(default=75.0, gt=0)  # of the scenarios, the clients and the energy
    golden_tolerance: float = Field(default=0.02, gt=0, le=1)  # of a logit, as a share of the largest
    quiet: Quiet = Quiet()
    seed: int = Field(default=0, ge=0)  # of the order of the engines and the choice of images

    def unmet(self) -> str:
        """Why this machine cannot pin so many threads or has no such backend; empty if it can and has."""
        if self.scenario_backend == "loadgen" and importlib.util.find_spec("mlperf_loadgen") is None:
            return (
                "benchmark.scenario_backend is loadgen and mlcommons-loadgen is not installed: "
                "pip install 'hpml-pipeline[loadgen]'"
            )
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

    The result is rejected, without a figure, if the machine was not quiet for long enough. Raises
    StageFailed that names the engine whose process crashed or whose golden outputs it does not reproduce, and
    ConfigInvalid where the reference is not among the engines.
    """
    from components.benchmark.measure import measure

    return measure(config, engines, data, out)
