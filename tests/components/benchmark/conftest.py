"""Real engines of the small network: torch eager, and ONNX Runtime in fp32 and int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, copy_files, open_artifact, seal_artifact
from hpml.artifacts.model import ModelSpec, QuantizationSpec
from hpml.components.__main__ import Job, execute
from hpml.core.contract import Output
from hpml.measuring.bench import Bench
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.subjects import EngineSubject
from hpml.measuring.subjects.engine import request_name
from hpml.measuring.subjects.tensors import write_arrays
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of


def _export(folder: Path, target: str, model: Artifact[ModelSpec], data: Artifact[DatasetSpec]) -> Any:
    job = Job(
        run="hpml.components.export.stage:run",
        config={"target": target},
        inputs={"model": str(model.path), "data": str(data.path)},
        out=str(folder),
        threads=1,
    )
    execute(job)
    return open_artifact(folder, kind="engine")


@pytest.fixture(scope="session")
def digits_engines(
    digits_data: Artifact[DatasetSpec],
    small_model: Artifact[ModelSpec],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Artifact[EngineSpec]]:
    """Engines built from the small network by the export stage."""
    place = tmp_path_factory.mktemp("engines")
    quantized = place / "quantized-model"
    quantized.mkdir()
    copy_files(small_model, quantized)
    quantization = QuantizationSpec(
        scheme="static",
        weights="int8-per-channel",
        activations="uint8",
        calibration="minmax",
        calibration_rows=tuple(range(64)),
    )
    spec = small_model.spec.model_copy(update={"quantization": quantization, "methods": ("quantize",)})
    seal_artifact(quantized, spec=spec, metrics={}, lineage=small_model.manifest.lineage)
    int8_model = open_artifact(quantized, kind="model")
    return {
        "fp32/eager": _export(place / "eager", "eager", small_model, digits_data),
        "fp32/onnx": _export(place / "onnx", "onnx", small_model, digits_data),
        "int8/onnx": _export(place / "int8", "onnx", int8_model, digits_data),
    }


@pytest.fixture
def inputs_of(digits_data: Artifact[DatasetSpec], tmp_path: Path) -> Callable[[int], Path]:
    """inputs_of(16): a file of the first 16 validation images, as all engines take them."""

    def make(rows: int) -> Path:
        task = task_of(digits_data.spec.task)
        stored = rows_of(task.stored(digits_data, "validation"), slice(rows))
        features = task.features(stored).items()
        write_arrays(tmp_path / "inputs.npz", {request_name("predict", name): x for name, x in features})
        return tmp_path / "inputs.npz"

    return make


@pytest.fixture
def digits_bench(
    digits_engines: dict[str, Artifact[EngineSpec]], inputs_of: Callable[[int], Path], tmp_path: Path
) -> Callable[..., Bench]:
    """digits_bench(config, names, rows=...): a bench of these engines; nothing is launched yet."""

    def make(config: BenchmarkConfig, *names: str, rows: int = 64) -> Bench:
        for folder in ("out", "scratch"):
            (tmp_path / folder).mkdir(exist_ok=True)
        subjects = {name: EngineSubject(folder=digits_engines[name].path) for name in names}
        out = Output(path=tmp_path / "out", scratch=tmp_path / "scratch", threads=2)
        return Bench(subjects, inputs_of(rows), config, out)

    return make
