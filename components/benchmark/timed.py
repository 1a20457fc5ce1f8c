"""Time any mapping of subjects together, and refuse what the machine disturbed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.benchmark import gpu
from components.benchmark.energy import measure_energy
from components.benchmark.environment import Pressure
from components.benchmark.protocol import Bench, Disturbed, Latencies, Launches, time_rounds
from components.benchmark.resources import Energy
from components.benchmark.scenarios import run_all
from components.benchmark.stage import BenchmarkConfig
from components.benchmark.subjects import Subject
from components.contract import Output
from components.measurements import ConcurrencyFigures, Conditions, ScenarioFigures


@dataclass(frozen=True)
class Timed:
    """What was timed of each subject, and how quiet it was. device_latencies: milliseconds on a GPU.

    rounds_of_launches: the rounds are in the order of the launches, and each has so many.
    invalid: why the measurement is refused; then nothing of it may be quoted.
    """

    latencies: Latencies
    device_latencies: Latencies
    launches: dict[str, Launches]
    energy: dict[str, Energy]
    scenarios: dict[str, tuple[ScenarioFigures, ...]]
    concurrency: dict[str, tuple[ConcurrencyFigures, ...]]
    conditions: Conditions
    threads: int
    rounds_of_launches: tuple[int, ...] = ()
    invalid: str = ""

    @property
    def rounds(self) -> int:
        """How many rounds every subject was timed in."""
        return min((len(of_batch[1]) for of_batch in self.latencies.values()), default=0)

    @property
    def harness_us_per_request(self) -> float:
        """What timing itself costs, in the process where it cost most."""
        return max(launches.harness_us_per_request for launches in self.launches.values())


def time_subjects(
    config: BenchmarkConfig, subjects: Mapping[str, Subject], inputs: Path, out: Output
) -> Timed:
    """Time all `subjects` in interleaved rounds with the same inputs.

    inputs: an .npz file, one array (rows, ...) for each input name. Progress goes to `out.events`, and
    `out.scratch` gets the logs of the processes.
    Raises StageFailed that names the subject whose process crashed, or that answers wrongly.
    """
    bench = Bench(subjects, inputs, config, out)
    before, gpu_before = Pressure.read(), gpu.read()
    latencies: Latencies = {}
    device_latencies: Latencies = {}
    energy: dict[str, Energy] = {}
    scenarios: dict[str, tuple[ScenarioFigures, ...]] = {}
    concurrency: dict[str, tuple[ConcurrencyFigures, ...]] = {}
    rounds_of_launches: tuple[int, ...] = ()
    probe_spread: float | None = None
    invalid = ""
    try:
        timing = time_rounds(bench, out)
        latencies, device_latencies = timing.latencies(), timing.device_latencies()
        rounds_of_launches = timing.rounds_of_launches
        probe_spread = timing.probe_spread()
        invalid = timing.objections()
        if not invalid:
            bench.grant(config.scenario_budget_s)
            with bench.launched():
                for name, (of_scenarios, of_clients) in run_all(
                    bench, longest_s=config.scenario_seconds
                ).items():
                    scenarios[name], concurrency[name] = of_scenarios, of_clients
                energy = measure_energy(bench)
    except Disturbed as error:
        invalid = error.what
    after = Pressure.read()
    watch = bench.watch
    conditions = Conditions(
        slices=watch.slices,
        dropped=watch.dropped,
        enforced=config.quiet.enforce,
        causes=dict(watch.causes.most_common()),
        cpu_pressure=after.share_since(before) if before and after else None,
        probe_spread=probe_spread,
        gpu=gpu.describe(gpu_before, gpu.read()),
    )
    if invalid and watch.causes:
        invalid += f" ({watch.dropped} of {watch.slices} slices: {'; '.join(conditions.causes)})"
    return Timed(
        latencies=latencies,
        device_latencies=device_latencies,
        launches=bench.launches,
        energy=energy,
        scenarios=scenarios,
        concurrency=concurrency,
        conditions=conditions,
        threads=bench.threads,
        rounds_of_launches=rounds_of_launches,
        invalid=invalid,
    )


def write_samples(path: Path, timed: Timed) -> None:
    """All samples in milliseconds, float64 (rounds, requests), as .npz.

    "NAME@BATCH" is what a caller waited, "NAME@BATCH/device" the time on the GPU.
    """
    arrays = {
        f"{name}@{batch}{suffix}": latency_ms
        for suffix, latencies in (("", timed.latencies), ("/device", timed.device_latencies))
        for name, of_batch in latencies.items()
        for batch, latency_ms in of_batch.items()
    }
    np.savez(path, allow_pickle=False, **arrays)
