"""A real engine, chosen and registered, and its bundle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, EngineSettings, MeasurementsSpec
from hpml.artifacts.model import ModelSpec, QuantizationSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.components.evaluate import stage as evaluate
from hpml.components.export import stage as export
from hpml.components.register import stage as register
from hpml.components.register.config import RegisterConfig
from hpml.components.select import stage as select
from hpml.core.contract import Config, Output
from hpml.measuring.goals import Goals
from hpml.targets import Eager, Onnx
from hpml.tasks import task_of


def lineage(**parents: str) -> Lineage:
    return Lineage(
        stage="fixture",
        code_digest="",
        config=None,
        parents=parents,
        libraries={},
        started_at_s=0.0,
        seconds=0.0,
        peak_rss_bytes=0,
    )


@dataclass(frozen=True)
class Deployable:
    """What `bundle` reads, and the registry that holds the engine."""

    engine: Artifact[EngineSpec]
    version: Artifact[RegistrationSpec]
    evaluation: Artifact[EvaluationSpec]
    registry: str

    def with_others(self, **others: Artifact[Any]) -> dict[str, Artifact[Any]]:
        """The inputs of `bundle`, some of them others."""
        return {"engine": self.engine, "version": self.version, "evaluation": self.evaluation, **others}


def perform(place: Path, stage_run: Callable[..., Any], config: Config, **inputs: Any) -> Artifact[Any]:
    """The artifact of one stage, in `place`."""
    place.mkdir()
    out = Output(place, place.with_name(f"{place.name}.scratch"), threads=1)
    out.scratch.mkdir()
    result = stage_run(config, **inputs, out=out)
    seal_artifact(place, spec=result.spec, metrics=dict(result.metrics), lineage=lineage())
    return open_artifact(place, kind=result.spec.kind)


SETTINGS = EngineSettings(threads=2, spinning=False)


def measured(
    place: Path, engine: Artifact[EngineSpec], settings: EngineSettings | None
) -> Artifact[MeasurementsSpec]:
    latency = Interval(value=0.71, low=0.69, high=0.73)
    figures = EngineFigures(
        status="measured",
        target="onnx",
        precision=engine.spec.precision,
        methods=(),
        size_bytes=engine.spec.size_bytes,
        parameters=engine.spec.parameters,
        macs=engine.spec.macs,
        quality={name: Interval(value=v, low=v, high=v) for name, v in engine.spec.quality.items()},
        settings=settings,
        latency_ms_p50=latency,
        latency_ms_p90=latency,
        latency_ms_p99=latency,
    )
    spec = MeasurementsSpec(
        reference="reference",
        best_fp32="reference",
        engines={"reference": figures, "variant": figures},
        metrics=tuple(metric.facts for metric in task_of(engine.spec.task).metrics),
        rounds=1,
        threads=1,
        seed=0,
        environment={},
    )
    place.mkdir()
    parents = {"engines/reference": engine.digest, "engines/variant": engine.digest, "data": "d"}
    seal_artifact(place, spec=spec, metrics={}, lineage=lineage(**parents))
    return open_artifact(place, kind="measurements")


def chosen_and_registered(
    place: Path,
    exported: Artifact[EngineSpec],
    data: Artifact[DatasetSpec],
    settings: EngineSettings | None = None,
    registry: str = "",
) -> Deployable:
    """The engine, chosen, scored and registered as a version of "digits", the first in a new registry."""
    figures = measured(place / "measured", exported, settings)
    engines = {"reference": exported, "variant": exported}
    chosen = perform(place / "chosen", select.run, Goals(), measured=figures, engines=engines)
    tested = perform(place / "tested", evaluate.run, Goals(), measured=figures, engines=engines, data=data)
    registry = registry or f"sqlite:///{place / 'mlflow.db'}"
    config = RegisterConfig(model_name="digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", registry)
        version = perform(
            place / "version", register.run, config, engine=chosen, measured=figures, evaluation=tested
        )
    return Deployable(chosen, version, tested, registry)


@pytest.fixture(scope="session")
def deployable(
    small_model: Artifact[ModelSpec],
    digits_data: Artifact[DatasetSpec],
    tmp_path_factory: pytest.TempPathFactory,
) -> Deployable:
    """The small network as an ONNX engine in fp32, measured with SETTINGS."""
    place = tmp_path_factory.mktemp("deployable")
    exported = perform(place / "exported", export.run, Onnx(), model=small_model, data=digits_data)
    return chosen_and_registered(place, exported, digits_data, SETTINGS)


@pytest.fixture(scope="session")
def deployable_eager(
    small_model: Artifact[ModelSpec],
    digits_data: Artifact[DatasetSpec],
    tmp_path_factory: pytest.TempPathFactory,
) -> Deployable:
    """The small network for a runtime that Triton does not serve and a bundle cannot bring along."""
    place = tmp_path_factory.mktemp("deployable-eager")
    exported = perform(place / "exported", export.run, Eager(), model=small_model, data=digits_data)
    return chosen_and_registered(place, exported, digits_data)


def exported_int8(
    place: Path, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], activations: Any
) -> Artifact[EngineSpec]:
    """`model` as an ONNX engine in int8."""
    shutil.copytree(model.path, place / "model")
    (place / "model" / "manifest.json").unlink()
    quantization = QuantizationSpec(
        scheme="static",
        weights="int8-per-channel",
        activations=activations,
        calibration="minmax",
        calibration_rows=tuple(range(64)),
    )
    spec = model.spec.model_copy(update={"quantization": quantization})
    seal_artifact(place / "model", spec=spec, metrics={}, lineage=lineage())
    quantized = open_artifact(place / "model", kind="model")
    return perform(place / "exported", export.run, Onnx(), model=quantized, data=data)


@pytest.fixture(scope="session")
def deployable_int8(
    small_model: Artifact[ModelSpec],
    digits_data: Artifact[DatasetSpec],
    tmp_path_factory: pytest.TempPathFactory,
) -> Deployable:
    """The small network as an ONNX engine in int8."""
    place = tmp_path_factory.mktemp("deployable-int8")
    exported = exported_int8(place, small_model, digits_data, "uint8")
    return chosen_and_registered(place, exported, digits_data)


@pytest.fixture(scope="session")
def deployed(deployable: Deployable, tmp_path_factory: pytest.TempPathFactory) -> Artifact[BundleSpec]:
    """The bundle of that engine. Not to be changed."""
    place = tmp_path_factory.mktemp("deployed") / "bundle"
    return perform(place, bundling.run, BundleConfig(), **deployable.with_others())


def resealed(
    engine: Artifact[EngineSpec],
    place: Path,
    change: Callable[[Path], None] = lambda place: None,
    spec: EngineSpec | None = None,
) -> Artifact[EngineSpec]:
    """The engine with something changed and sealed again, as a defect or another version upstream has it."""
    shutil.copytree(engine.path, place)
    change(place)
    (place / "manifest.json").unlink()
    seal_artifact(place, spec=spec or engine.spec, metrics={}, lineage=engine.manifest.lineage)
    return open_artifact(place, kind="engine")


@pytest.fixture
def bundle(deployed: Artifact[BundleSpec], tmp_path: Path) -> Path:
    """A copy of the bundle, somewhere else, to do with as one likes."""
    shutil.copytree(deployed.path, tmp_path / "elsewhere")
    return tmp_path / "elsewhere"
