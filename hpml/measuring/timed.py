"""Time any mapping of subjects together, and say how quiet the machine was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.artifacts.measurements import Conditions, EngineSettings, MeasurementsSpec
from hpml.core.contract import Output
from hpml.measuring.bench import Bench, Launches
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine import gpu
from hpml.measuring.machine.energy import measure_energy
from hpml.measuring.machine.environment import Pressure
from hpml.measuring.paired import compared, missing
from hpml.measuring.protocol import time_rounds
from hpml.measuring.resources import LaunchRecord
from hpml.measuring.rounds import Rounds
from hpml.measuring.scenarios import run_all
from hpml.measuring.subjects import Subject

_ELSEWHERE = "not measured: it runs on a server"


@dataclass(frozen=True)
class Timed:
    """What was timed of each subject. measurements: all but the figures of the engines."""

    rounds: Rounds
    told: dict[str, LaunchRecord]
    settings: dict[str, EngineSettings]
    measurements: MeasurementsSpec


def time_subjects(
    config: BenchmarkConfig,
    subjects: Mapping[str, Subject],
    inputs: Path,
    environment: dict[str, str],
    out: Output,
) -> Timed:
    """Time all `subjects` in interleaved rounds with the same inputs.

    inputs: an .npz file, one array (rows, ...) for each input name. environment: `describe()` from before.
    Progress goes to `out.events`, and `out.scratch` gets the logs of the processes and the rounds, for a
    later attempt. Raises StageFailed that names the subject whose process crashed, or that answers wrongly.
    """
    bench = Bench(subjects, inputs, config, out)
    before, gpu_before = Pressure.read(), gpu.read()
    rounds = time_rounds(bench, out)
    of_loads = run_all(bench)
    measure_energy(bench)
    after, watch = Pressure.read(), bench.watch
    conditions = Conditions(
        slices=watch.slices,
        dropped=watch.dropped,
        causes=dict(watch.causes.most_common()),
        cpu_pressure=after.share_since(before) if before and after else None,
        gpu=gpu.describe(gpu_before, gpu.read()),
        unseen=watch.unseen,
    )
    lacking = missing(rounds, config, bench.names)
    measurements = MeasurementsSpec(
        reference=config.reference,
        best_fp32="",
        engines={},
        unit="samples",
        slice_ms=config.slice_ms,
        threads=bench.threads,
        seed=config.seed,
        environment=environment,
        harness_us_per_request=bench.harness_us_per_request,
        conditions=conditions,
        incomplete=f"not measured: {lacking}: {conditions.busy}" if lacking else "",
        **compared(rounds, bench.names, precision=config.precision),
    )
    told = {}
    for name, (scenarios, concurrency) in of_loads.items():
        told[name] = LaunchRecord(
            **_own(bench.launches[name]),
            settings=bench.settings[name],
            scenarios=scenarios,
            concurrency=concurrency,
        )
    return Timed(rounds, told, bench.settings, measurements)


def _own(launches: Launches) -> dict[str, Any]:
    """What our own process told; of a subject that runs elsewhere that is nothing."""
    if launches.device == "remote":
        return {"device": "remote", "energy_source": _ELSEWHERE}
    return vars(launches)
