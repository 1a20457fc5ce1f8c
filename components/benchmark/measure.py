"""The benchmark of a run: its engines as subjects, validation rows as inputs, what was timed as figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec, build_of
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, OperationFigures
from hpml.core.contract import Output, Result, validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.figures import best_fp32, engine_figures, timings
from hpml.measuring.machine.environment import describe
from hpml.measuring.paired import subject_name
from hpml.measuring.quality import judged_engines, paired_quality, quality
from hpml.measuring.samples import write_samples
from hpml.measuring.subjects import EngineSubject
from hpml.measuring.subjects.engine import request_name
from hpml.measuring.subjects.tensors import known_of_engine, write_arrays
from hpml.measuring.timed import Timed, time_subjects
from hpml.targets import AnyTarget
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of

_POOL_ROWS = 64  # validation rows that the requests cycle through, more where a batch needs more

Engines = Mapping[str, Artifact[EngineSpec]]


def measure(
    config: BenchmarkConfig, engines: Engines, data: Artifact[DatasetSpec], out: Output
) -> Result[MeasurementsSpec]:
    """Time all built engines and describe all; see `hpml.components.benchmark.stage.run`."""
    built = _built(config.reference, engines)
    environment = describe()
    inputs = out.scratch / "inputs.npz"
    write_arrays(inputs, _requests(config, built, data, out.threads))
    [operation, *others] = built[config.reference].spec.operations
    subjects = {
        subject_name(name, one.name) if one in others else name: EngineSubject(
            folder=engine.path.resolve(), operation=one.name, golden_tolerance=config.golden_tolerance
        )
        for one in (operation, *others)
        for name, engine in built.items()
    }
    timed = time_subjects(config, subjects, inputs, environment, out)
    names = list(subjects)
    write_samples(out.path / "samples.npz", timed.rounds, names, config)
    fastest_fp32 = best_fp32(engines, timed.rounds, names, reference=config.reference)
    figures = described(config, engines, data, timed, fastest_fp32)
    task = task_of(data.spec.task)
    unit, units_per_row = task.units_of_request(operation.name)
    spec = timed.measurements.model_copy(
        update={
            "best_fp32": fastest_fp32,
            "engines": figures,
            "operation": operation.name,
            "operations": {
                one.name: _of_operation(one.name, config, built, timed, fastest_fp32) for one in others
            },
            "metrics": tuple(metric.facts for metric in task.metrics),
            "unit": unit if units_per_row == 1 else task.rows,
        }
    )
    is_rejected = config.require_quiet and spec.incomplete
    return Result(
        spec,
        metrics=_metrics(spec),
        rejected=f"{spec.incomplete}; benchmark.require_quiet is set" if is_rejected else "",
        incomplete=spec.incomplete,
    )


def _built(reference: str, engines: Engines) -> dict[str, Artifact[EngineSpec]]:
    """The engines that were built.

    Raises ConfigInvalid or StageFailed if the reference is not among them.
    """
    if reference not in engines:
        raise ConfigInvalid(
            f"benchmark.reference is {reference!r}",
            why="the run has no such engine",
            fix=f"name one of {', '.join(engines)}",
        )
    spec = engines[reference].spec
    if spec.status != "built":
        raise StageFailed(f"the reference engine {reference!r} was not built", why=spec.reason)
    return {name: engine for name, engine in engines.items() if engine.spec.status == "built"}


def _requests(
    config: BenchmarkConfig, built: Engines, data: Artifact[DatasetSpec], threads: int
) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs of each operation that all engines get, of validation rows, repeated for larger batches.

    What one operation takes of another's outputs, such as a cache, is the reference's. Raises StageFailed if
    the engines do not take the same inputs: their figures could not be compared.
    """
    tasks = {name: engine.spec.task for name, engine in built.items()}
    unlike = [name for name, task in tasks.items() if task != tasks[config.reference]]
    if unlike:
        raise StageFailed(
            "the engines do not take the same inputs",
            why=f"{', '.join(unlike)} and {config.reference} are of other data",
            fix="benchmark engines of the same data and preprocessing together",
        )
    reference = built[config.reference]
    task = task_of(reference.spec.task)
    rows = np.random.default_rng(config.seed).permutation(data.spec.split("validation").rows)
    wanted = max(_POOL_ROWS, *config.timed_batches)
    stored = rows_of(task.stored(data, "validation"), np.resize(rows, wanted))
    target: AnyTarget = validate(AnyTarget, reference.spec.target, where="the target of the reference")
    runs = target.load(reference.path, reference.spec, threads=threads, spinning=False)
    return {
        request_name(operation.name, name): np.asarray(array)
        for operation in reference.spec.operations
        for name, array in task.requests(runs, stored, operation).items()
    }


def described(
    config: BenchmarkConfig, engines: Engines, data: Artifact[DatasetSpec], timed: Timed, fastest_fp32: str
) -> dict[str, EngineFigures]:
    """The figures of every engine, built or not. timed: those that were. fastest_fp32: empty without one."""
    used = {name: settings for name, settings in timed.settings.items() if name in engines}
    built = {name: build_of(engines[name], settings.variant) for name, settings in used.items()}
    engines = {**engines, **built}
    busy = timed.measurements.conditions.busy
    timings_of = timings(timed.rounds, config, list(timed.settings), fastest_fp32=fastest_fp32, busy=busy)
    judged = judged_engines(engines, data)
    task = task_of(data.spec.task)
    groups = task.groups(task.stored(data, "validation"))
    found = {}
    for name, engine in engines.items():
        spec, known = engine.spec, known_of_engine(engine.spec)
        if name not in built:
            found[name] = EngineFigures(status="not built", reason=spec.reason, **known)
            continue
        known["quality"] = quality(judged[name])
        if name != config.reference:
            known["paired"] = paired_quality(judged[name], judged[config.reference], groups)
        found[name] = engine_figures(known, timings_of[name], timed.told[name], config, busy)
    return found


def _of_operation(
    operation: str, config: BenchmarkConfig, built: Engines, timed: Timed, fastest_fp32: str
) -> OperationFigures:
    """The timings of every engine in an operation that goals do not judge."""
    busy = timed.measurements.conditions.busy
    timings_of = timings(timed.rounds, config, list(timed.settings), fastest_fp32=fastest_fp32, busy=busy)
    found = {}
    for name, engine in built.items():
        subject = subject_name(name, operation)
        spec = build_of(engine, timed.settings[subject].variant).spec
        found[name] = engine_figures(
            known_of_engine(spec), timings_of[subject], timed.told[subject], config, busy
        )
    unit, units_per_row = task_of(built[config.reference].spec.task).units_of_request(operation)
    return OperationFigures(engines=found, unit=unit, units_per_row=units_per_row)


def _metrics(spec: MeasurementsSpec) -> dict[str, float]:
    """For the tracker: latency and speed-up of each engine."""
    return {
        f"{figure}/{name}": interval.value
        for name, engine in spec.engines.items()
        for figure in ("latency_ms_p50", "latency_ms_p99", "speedup_vs_reference")
        if (interval := getattr(engine, figure)) is not None
    }
