"""What can be set about a measurement, and what counts as undisturbed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpml.artifacts.measurements import ScenarioName
from hpml.core.contract import Config
from hpml.core.hardware import usable_cpus


class Quiet(Config):
    """What counts as undisturbed, as shares of the time; see `hpml.measuring.machine.watch`."""

    max_waited: float = Field(default=0.02, ge=0)  # for a CPU, summed over the engine's threads
    max_stolen: float = Field(default=0.02, ge=0)  # by the hypervisor, summed over the CPUs


class BenchmarkConfig(Config):
    """How the engines are timed. A round is every engine once at one batch size, in slices of `slice_ms`."""

    reference: str = Field(default="fp32/eager", min_length=1)  # the engine that speed-ups refer to
    rounds: int = Field(default=60, ge=5, le=10_000)  # undisturbed, at each batch size, at least
    launches: int = Field(default=5, ge=1, le=100)  # fresh processes; rounds are spread over them
    slice_ms: float = Field(default=25.0, gt=0, le=10_000)  # of one engine's requests; 3 requests at least
    precision: float = Field(default=0.01, gt=0, lt=1)  # of speed-ups at batch 1, in each state: then it ends
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 8, 32)  # throughput is measured here
    warmup_requests: int = Field(default=20, ge=1, le=10_000)  # at each batch size, after each launch
    scenarios: tuple[ScenarioName, ...] = ("SingleStream", "MultiStream", "Offline", "Server")
    scenario_seconds: float = Field(default=10.0, gt=0)  # that one scenario of one engine may take at most
    server_latency_bound_ms: float = Field(default=15.0, gt=0)  # of p99; MLPerf's for ResNet-50 is 15 ms
    concurrency: tuple[Annotated[int, Field(ge=1, le=256)], ...] = (1, 2, 4)  # clients of the closed loop
    price_per_hour: float | None = Field(default=None, gt=0)  # of this machine, in any currency
    threads: int | None = Field(default=None, ge=1, le=1024)  # of each engine; null: what is fastest here
    time_budget_s: float = Field(default=90.0, gt=0)  # of the rounds: what is not known then is not measured
    scenario_budget_s: float = Field(default=75.0, gt=0)  # of the scenarios, the clients and the energy
    golden_tolerance: float = Field(default=0.02, gt=0, le=1)  # of a logit, as a share of the largest
    quiet: Quiet = Quiet()
    require_quiet: bool = False  # end with exit code 5 where something is not measured, as a gate in CI
    seed: int = Field(default=0, ge=0)  # of the order of the engines and the choice of images

    @property
    def timed_batches(self) -> list[int]:
        """The batch sizes that are timed, ascending; 1 always is, for latency."""
        return sorted({1, *self.batch_sizes})

    def unsupported_reason(self) -> str:
        """Why this machine cannot pin so many threads; empty if it can."""
        if self.threads and self.threads > usable_cpus():
            return f"benchmark.threads is {self.threads}, this machine has {usable_cpus()} CPUs to use"
        return ""
