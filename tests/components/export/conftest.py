"""Engines of the small network, built once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import Quantize
from hpml.components.compress import stage as compress
from hpml.components.export import stage as export
from hpml.targets import Onnx


@pytest.fixture(scope="session")
def quantized_model(
    run_stage_once: Callable[..., Artifact[Any]],
    digits_data: Artifact[DatasetSpec],
    small_model: Artifact[ModelSpec],
) -> Artifact[ModelSpec]:
    """The small network with a quantization spec that leaves its first convolution in fp32."""
    config = Quantize(calibration_samples=64, excluded_layers=("features.0",))
    return run_stage_once(compress.run, config, model=small_model, teacher=small_model, data=digits_data)


@pytest.fixture(scope="session")
def onnx_fp32(
    run_stage_once: Callable[..., Artifact[Any]],
    digits_data: Artifact[DatasetSpec],
    small_model: Artifact[ModelSpec],
) -> Artifact[EngineSpec]:
    return run_stage_once(export.run, Onnx(), model=small_model, data=digits_data)


@pytest.fixture(scope="session")
def onnx_int8(
    run_stage_once: Callable[..., Artifact[Any]],
    digits_data: Artifact[DatasetSpec],
    quantized_model: Artifact[ModelSpec],
) -> Artifact[EngineSpec]:
    return run_stage_once(export.run, Onnx(), model=quantized_model, data=digits_data)
