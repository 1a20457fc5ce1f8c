"""Time any mapping of subjects together, and say how quiet the machine was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpml.artifacts.measurements import ConcurrencyFigures, Conditions, EngineSettings, ScenarioFigures
from hpml.core.contract import Output
from hpml.measuring.bench import Bench, Launches
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine import gpu
from hpml.measuring.machine.energy import measure_energy
from hpml.measuring.machine.environment import Pressure
from hpml.measuring.paired import missing
from hpml.measuring.protocol import time_rounds
from hpml.measuring.resources import Energy
from hpml.measuring.rounds import Rounds
from hpml.measuring.scenarios import run_all
from hpml.measuring.subjects import Subject


@dataclass(frozen=True)
class Timed:
    """What was timed of each subject, and how quiet it was.

    missing: which figures there are too few undisturbed rounds for; empty if there are enough for all.
    """

    rounds: Rounds
    launches: dict[str, Launches]
    settings: dict[str, EngineSettings]
    energy: dict[str, Energy]
    scenarios: dict[str, tuple[ScenarioFigures, ...]]
    concurrency: dict[str, tuple[ConcurrencyFigures, ...]]
    conditions: Conditions
    threads: int
    missing: str = ""

    @property
    def harness_us_per_request(self) -> float:
        """What timing itself costs, in the process where it cost most."""
        return max(launches.harness_us_per_request for launches in self.launches.values())

    @property
    def incomplete(self) -> str:
        """What is not measured, and why; empty if nothing."""
        return f"not measured: {self.missing}: {self.conditions.busy}" if self.missing else ""


def time_subjects(
    config: BenchmarkConfig, subjects: Mapping[str, Subject], inputs: Path, out: Output
) -> Timed:
    """Time all `subjects` in interleaved rounds with the same inputs.

    inputs: an .npz file, one array (rows, ...) for each input name. Progress goes to `out.events`, and
    `out.scratch` gets the logs of the processes and the rounds, for a later attempt.
    Raises StageFailed that names the subject whose process crashed, or that answers wrongly.
    """
    bench = Bench(subjects, inputs, config, out)
    before, gpu_before = Pressure.read(), gpu.read()
    rounds = time_rounds(bench, out)
    scenarios: dict[str, tuple[ScenarioFigures, ...]] = {}
    concurrency: dict[str, tuple[ConcurrencyFigures, ...]] = {}
    for name, (of_scenarios, of_clients) in run_all(bench, longest_s=config.scenario_seconds).items():
        scenarios[name], concurrency[name] = of_scenarios, of_clients
    energy = measure_energy(bench)
    after, watch = Pressure.read(), bench.watch
    return Timed(
        rounds=rounds,
        launches=bench.launches,
        settings=bench.settings,
        energy=energy,
        scenarios=scenarios,
        concurrency=concurrency,
        conditions=Conditions(
            slices=watch.slices,
            dropped=watch.dropped,
            causes=dict(watch.causes.most_common()),
            cpu_pressure=after.share_since(before) if before and after else None,
            gpu=gpu.describe(gpu_before, gpu.read()),
            unseen=watch.unseen,
        ),
        threads=bench.threads,
        missing=missing(rounds, config, bench.names),
    )
