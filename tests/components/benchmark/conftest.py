"""Real engines of the small network: torch eager, and ONNX Runtime in fp32 and int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.__main__ import Job, execute
from components.artifacts import (
    Artifact,
    DatasetSpec,
    EngineSpec,
    ModelSpec,
    QuantizationSpec,
    copy_files,
    open_artifact,
    seal_artifact,
)


def _export(folder: Path, target: str, model: Artifact[ModelSpec], data: Artifact[DatasetSpec]) -> Any:
    job = Job(
        run="components.export.stage:run",
        config={"target": target},
        inputs={"model": str(model.path), "data": str(data.path)},
        out=str(folder),
        threads=2,
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
