"""What a report is written from: everything that the artifacts of a run say, checked once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.artifacts.metric import MetricFacts
from hpml.artifacts.model import ModelSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.measuring.goals import Decision, Goals, decide, metric_of
from hpml.reporting.evaluation import test_score_in_words
from hpml.reporting.over_time import LatencyOverTime, latency_over_time
from hpml.tasks import Task, task_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Training:
    """One training and its curves: a row an epoch. `names`: the variants that have this very network."""

    names: tuple[str, ...]
    history: tuple[dict[str, float], ...]

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(epoch, value) of the rows that have a finite `key`."""
        return [
            (row["epoch"], row[key])
            for row in self.history
            if "epoch" in row and math.isfinite(row.get(key, math.nan))
        ]


@dataclass(frozen=True)
class StepCost:
    """What one step of the run took when it was run."""

    name: str
    stage: str
    seconds: float
    peak_rss_bytes: int
    started_at_s: float


@dataclass(frozen=True)
class Content:
    """All that is shown. latency_ms: the undisturbed samples of each measured engine at batch 1.

    peaks, diagnosis, evaluation: None where the run has none.
    over_time: None where the samples do not say when.
    """

    goals: Goals
    decision: Decision
    measurements: MeasurementsSpec
    engines: dict[str, EngineSpec]
    data: DatasetSpec
    peaks: PeaksSpec | None
    diagnosis: DiagnosisSpec | None
    evaluation: EvaluationSpec | None
    left_out: Mapping[str, str]  # what the run failed to make, and why; see contract.Output
    trainings: tuple[Training, ...]
    steps: tuple[StepCost, ...]
    latency_ms: dict[str, NDArray[np.float64]]
    over_time: LatencyOverTime | None

    @property
    def metric(self) -> MetricFacts:
        """What the goals go by."""
        return metric_of(self.goals, self.measurements)

    def tested_in_words(self) -> str:
        """How good the chosen engine is on the test split; there has to be an evaluation of it."""
        assert self.evaluation is not None
        return test_score_in_words(self.evaluation)

    @property
    def task(self) -> Task:
        """What the data, and so the engines, are for."""
        return task_of(self.data.task)


def gather(
    goals: Goals,
    measured: Artifact[MeasurementsSpec],
    engines: Mapping[str, Artifact[EngineSpec]],
    models: Mapping[str, Artifact[ModelSpec]],
    data: Artifact[DatasetSpec],
    peaks: Artifact[PeaksSpec] | None,
    diagnosis: Artifact[DiagnosisSpec] | None,
    evaluation: Artifact[EvaluationSpec] | None,
    *,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Content:
    """Read the artifacts. left_out: see contract.Output; its engines are shown as not built.

    Raises StageFailed if the measurements are of other engines than `engines`, or miss samples.
    """
    if set(measured.spec.engines) != set(engines):
        raise StageFailed(
            "the measurements are not of these engines",
            why=f"they are of {', '.join(measured.spec.engines)}; given are {', '.join(engines)}",
        )
    in_order = {name: measured.spec.engines[name] for name in engines}
    measurements = measured.spec.model_copy(update={"engines": in_order | _not_built(left_out)})
    samples = _samples(measured, engines)
    return Content(
        goals=goals,
        decision=decide(goals, measurements),
        measurements=measurements,
        engines={name: engine.spec for name, engine in engines.items()},
        data=data.spec,
        trainings=_trainings(models),
        peaks=peaks.spec if peaks else None,
        diagnosis=diagnosis.spec if diagnosis else None,
        evaluation=evaluation.spec if evaluation else None,
        left_out=left_out,
        steps=_steps([data, measured, peaks, diagnosis, evaluation], engines, models),
        latency_ms={
            name: samples[f"{name}@1"][np.isfinite(samples[f"{name}@1"])]
            for name in engines
            if measurements.engines[name].latency_ms_p50
        },
        over_time=latency_over_time(samples, engines),
    )


def _not_built(left_out: Mapping[str, str]) -> dict[str, EngineFigures]:
    """The engines whose steps failed, as those that a machine cannot build."""
    return {
        name.removeprefix("engines/"): EngineFigures(
            status="not built",
            reason=reason,
            target=name.rpartition("/")[2],
            precision="",
            methods=(),
            size_bytes=0,
            parameters=0,
            macs=0,
        )
        for name, reason in left_out.items()
        if name.startswith("engines/")
    }


def _trainings(models: Mapping[str, Artifact[ModelSpec]]) -> tuple[Training, ...]:
    names_of: dict[str, list[str]] = {}
    for name, model in models.items():
        if model.spec.status == "built":
            names_of.setdefault(model.digest, []).append(name)
    trainings = (Training(tuple(names), _history(models[names[0]])) for names in names_of.values())
    return tuple(training for training in trainings if training.history)


def _history(model: Artifact[ModelSpec]) -> tuple[dict[str, float], ...]:
    file = model.file("history.json")
    try:
        rows = json.loads(file.read_bytes())
    except ValueError as error:
        raise StageFailed(f"{file} is not JSON", why=str(error)) from None
    history: tuple[dict[str, float], ...] = validate(tuple[dict[str, float], ...], rows, where=str(file))
    return history


def _steps(
    others: Iterable[Artifact[Any] | None],
    engines: Mapping[str, Artifact[EngineSpec]],
    models: Mapping[str, Artifact[ModelSpec]],
) -> tuple[StepCost, ...]:
    """The steps that made these artifacts, each once, in the order in which they started."""
    by_digest: dict[str, StepCost] = {}
    for name, artifact in chain((("", one) for one in others if one), models.items(), engines.items()):
        lineage = artifact.manifest.lineage
        step = StepCost(
            name=name if lineage.stage in ("compress", "export") else "",
            stage=lineage.stage,
            seconds=lineage.seconds,
            peak_rss_bytes=lineage.peak_rss_bytes,
            started_at_s=lineage.started_at_s,
        )
        by_digest.setdefault(artifact.digest, step)
    return tuple(sorted(by_digest.values(), key=lambda step: step.started_at_s))


def _samples(measured: Artifact[MeasurementsSpec], engines: Iterable[str]) -> dict[str, NDArray[Any]]:
    """What `samples.npz` has of batch 1; see `MeasurementsSpec`."""
    file = measured.file("samples.npz")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            samples = {name: arrays[name] for name in arrays.files if name.endswith("@1")}
    except ValueError as error:
        raise StageFailed(f"{file} does not hold the samples of the engines", why=str(error)) from None
    absent = [
        name
        for name in engines
        if measured.spec.engines[name].status == "measured" and f"{name}@1" not in samples
    ]
    if absent:
        raise StageFailed(
            f"{file} does not hold the samples of every measured engine", why=f"of {', '.join(absent)}"
        )
    return samples
