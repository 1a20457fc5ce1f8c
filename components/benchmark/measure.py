"""The benchmark of a run: its engines as subjects, its test images as inputs, what was timed as figures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec, build_of
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.core.contract import Output, Result
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.accuracy import paired_accuracies
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.figures import best_fp32, engine_figures, timings
from hpml.measuring.machine.environment import describe
from hpml.measuring.samples import write_samples
from hpml.measuring.statistics import wilson
from hpml.measuring.subjects import EngineSubject
from hpml.measuring.subjects.tensors import known_of_engine
from hpml.measuring.timed import Timed, time_subjects
from hpml.tasks.images import load_split, to_x_nchw

_POOL_IMAGES = 64  # test images that the requests cycle through, more where a batch needs more

Engines = Mapping[str, Artifact[EngineSpec]]


def measure(
    config: BenchmarkConfig, engines: Engines, data: Artifact[DatasetSpec], out: Output
) -> Result[MeasurementsSpec]:
    """Time all built engines and describe all; see `hpml.components.benchmark.stage.run`."""
    built = _built(config.reference, engines)
    environment = describe()
    inputs = out.scratch / "inputs.npz"
    np.savez(inputs, allow_pickle=False, x_nchw=_inputs(config, built, data))
    subjects = {
        name: EngineSubject(folder=engine.path.resolve(), golden_tolerance=config.golden_tolerance)
        for name, engine in built.items()
    }
    timed = time_subjects(config, subjects, inputs, environment, out)
    names = list(built)
    write_samples(out.path / "samples.npz", timed.rounds, names, config)
    fastest_fp32 = best_fp32(engines, timed.rounds, names, reference=config.reference)
    figures = described(config, engines, data, timed, fastest_fp32)
    spec = timed.measurements.model_copy(update={"best_fp32": fastest_fp32, "engines": figures})
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


def _inputs(config: BenchmarkConfig, built: Engines, data: Artifact[DatasetSpec]) -> np.ndarray:
    """Test images that all engines get, float32 NCHW; repeated where a batch outnumbers them.

    Raises StageFailed if the engines do not take the same inputs: their figures could not be compared.
    """
    taken = {engine.spec.input for engine in built.values()}
    if len(taken) > 1:
        raise StageFailed(
            "the engines do not take the same inputs",
            why="; ".join(sorted(str(spec) for spec in taken)),
            fix="benchmark engines of the same data and preprocessing together",
        )
    rows = np.random.default_rng(config.seed).permutation(data.spec.splits["test"].rows)
    wanted = max(_POOL_IMAGES, *config.timed_batches)
    images_nhwc, _ = load_split(data, "test")
    return to_x_nchw(images_nhwc[np.resize(rows, wanted)], taken.pop())


def described(
    config: BenchmarkConfig, engines: Engines, data: Artifact[DatasetSpec], timed: Timed, fastest_fp32: str
) -> dict[str, EngineFigures]:
    """The figures of every engine, built or not. timed: those that were. fastest_fp32: empty without one."""
    built = {name: build_of(engines[name], used.variant) for name, used in timed.settings.items()}
    engines = {**engines, **built}
    busy = timed.measurements.conditions.busy
    timings_of = timings(timed.rounds, config, list(built), fastest_fp32=fastest_fp32, busy=busy)
    paired = paired_accuracies(engines, data, reference=config.reference)
    found = {}
    for name, engine in engines.items():
        spec, known = engine.spec, known_of_engine(engine.spec)
        if name not in built:
            found[name] = EngineFigures(status="not built", reason=spec.reason, **known)
            continue
        known["accuracy_top1"] = wilson(spec.accuracy_top1, data.spec.splits["test"].rows)
        known["paired"] = paired.get(name)
        found[name] = engine_figures(known, timings_of[name], timed.told[name], config, busy)
    return found


def _metrics(spec: MeasurementsSpec) -> dict[str, float]:
    """For the tracker: latency and speed-up of each engine."""
    return {
        f"{figure}/{name}": interval.value
        for name, engine in spec.engines.items()
        for figure in ("latency_ms_p50", "latency_ms_p99", "speedup_vs_reference")
        if (interval := getattr(engine, figure)) is not None
    }
