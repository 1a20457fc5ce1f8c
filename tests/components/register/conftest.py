"""Chosen engines with their measurements, and stores to register them in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.artifacts.metric import ACCURACY_TOP1
from hpml.components.select import stage as select
from hpml.core import hardware
from hpml.measuring.goals import Goals
from tests.image_tasks import image_task

TASK = image_task(classes=3)


def lineage(**parents: str) -> Lineage:
    return Lineage(
        stage="fixture",
        code_digest="c0de",
        config=None,
        parents=parents,
        libraries={},
        started_at_s=0.0,
        seconds=0.0,
        peak_rss_bytes=0,
    )


@dataclass(frozen=True)
class Chosen:
    """What select hands to register."""

    engine: Artifact[EngineSpec]
    measured: Artifact[MeasurementsSpec]
    evaluation: Artifact[EvaluationSpec]

    @property
    def inputs(self) -> dict[str, Artifact[Any]]:
        """By the names of register's parameters."""
        return vars(self)

    @property
    def paths(self) -> dict[str, str]:
        """Likewise, where they lie."""
        return {name: str(artifact.path) for name, artifact in self.inputs.items()}


def _engine(place: Path, content: bytes) -> Artifact[EngineSpec]:
    place.mkdir()
    (place / "model.onnx").write_bytes(content)
    np.save(place / "golden_x_nchw.npy", np.zeros((2, 1, 8, 8), np.float32))
    spec = EngineSpec(
        target={"target": "onnx"},
        status="built",
        file="model.onnx",
        precision="int8",
        methods=("prune", "quantize"),
        task=TASK.model_dump(mode="json"),
        operations=TASK.operations(),
        identity={"runtime": "onnxruntime 1.0"},
        size_bytes=len(content),
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=lineage())
    return open_artifact(place, kind="engine")


def _figures(engine: Artifact[EngineSpec], p50: float) -> EngineFigures:
    latency = Interval(value=p50, low=0.95 * p50, high=1.05 * p50)
    return EngineFigures(
        status="measured",
        target="onnx",
        precision="int8",
        methods=(),
        size_bytes=engine.spec.size_bytes,
        parameters=10,
        macs=10,
        quality={"accuracy_top1": Interval(value=0.97, low=0.96, high=0.98)},
        latency_ms_p50=latency,
        latency_ms_p90=latency,
        latency_ms_p99=latency,
    )


def _evaluation(place: Path, engine_digest: str) -> Artifact[EvaluationSpec]:
    place.mkdir()
    spec = EvaluationSpec(
        test_split="once",
        engine="int8/onnx",
        engine_digest=engine_digest,
        reference="eager",
        rows=500,
        metrics=(ACCURACY_TOP1,),
        quality={"accuracy_top1": Interval(value=0.96, low=0.95, high=0.97)},
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=lineage())
    return open_artifact(place, kind="evaluation")


@pytest.fixture
def choose(tmp_path: Path, run_stage: Callable[..., Artifact[Any]]) -> Callable[..., Chosen]:
    """choose(content, p50=...): an engine of these bytes, measured and chosen. figures: instead of p50."""
    count = 0

    def make(
        content: bytes = b"weights",
        *,
        p50: float = 1.0,
        goals: Goals | None = None,
        data: str = "d1",
        threads: int = 1,
        cpu: str = "a CPU",
        figures: EngineFigures | None = None,
        states: tuple[CoreState, ...] = (),
    ) -> Chosen:
        nonlocal count
        count += 1
        engines = {
            "eager": _engine(tmp_path / f"eager-{count}", b"the reference"),
            "int8/onnx": _engine(tmp_path / f"engine-{count}", content),
        }
        spec = MeasurementsSpec(
            reference="eager",
            best_fp32="eager",
            engines={
                "eager": _figures(engines["eager"], 10.0),
                "int8/onnx": figures or _figures(engines["int8/onnx"], p50),
            },
            states=states,
            rounds=1,
            threads=threads,
            seed=0,
            environment={**hardware.identity(), "cpu": cpu, "load_average_1_min": f"{count}"},
        )
        place = tmp_path / f"measured-{count}"
        place.mkdir()
        parents = {f"engines/{name}": engine.digest for name, engine in engines.items()}
        seal_artifact(place, spec=spec, metrics={}, lineage=lineage(data=data, **parents))
        measured = open_artifact(place, kind="measurements")
        engine = run_stage(select.run, goals or Goals(), measured=measured, engines=engines)
        evaluation = _evaluation(tmp_path / f"evaluation-{count}", engines["int8/onnx"].digest)
        return Chosen(engine, measured, evaluation)

    return make


@pytest.fixture
def registry(new_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh local registry, named by the environment."""
    place = tmp_path / "registry"
    place.mkdir()
    shutil.copy(new_store, place / "mlflow.db")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri
