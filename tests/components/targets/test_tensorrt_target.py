"""TensorRT: what can be said without a GPU, and the whole way where there is one."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.components.export import stage as export
from hpml.core import hardware
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.targets import AnyTarget, TensorRT
from tests.image_tasks import image_task

ENGINE = EngineSpec(
    target={"target": "tensorrt"},
    status="built",
    file="model.plan",
    precision="fp16",
    methods=(),
    task=image_task().model_dump(mode="json"),
    operations=image_task().operations(),
)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_names", tuple)
    assert TensorRT().missing() == "this machine has no NVIDIA GPU"
    assert TensorRT().unsupported_reason() == ""
    assert "no NVIDIA GPU" in TensorRT(when_absent="refuse").unsupported_reason()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here")
def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_names", lambda: ("NVIDIA H200",))
    assert "pip install 'hpml-pipeline[tensorrt]'" in TensorRT().missing()


def test_an_engine_is_not_loaded_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "gpu_names", tuple)
    with pytest.raises(StageFailed, match="cannot run here: this machine has no NVIDIA GPU"):
        TensorRT().load(tmp_path, ENGINE, threads=1)


def test_the_batch_that_kernels_are_chosen_for_is_one_it_takes():
    with pytest.raises(ConfigInvalid, match="optimal_batch 128 is above max_batch 64"):
        validate(AnyTarget, {"target": "tensorrt", "optimal_batch": 128}, where="target")


@pytest.mark.skipif(bool(TensorRT().missing()), reason=f"needs TensorRT: {TensorRT().missing()}")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_plan_is_built_gated_and_loaded(run_stage, small_model, digits_data, precision, tmp_path):
    config = TensorRT(float_precision=precision, max_batch=8, timing_cache=str(tmp_path / "timings"))
    engine = run_stage(export.run, config, model=small_model, data=digits_data)
    assert (engine.spec.status, engine.spec.precision) == ("built", precision)
    assert engine.spec.size_bytes == engine.file("model.plan").stat().st_size  # without graph.onnx
    session = config.load(engine.path, engine.spec, threads=1)
    golden = np.load(engine.file("golden_logits.npy"))
    answers = session.run({"x_nchw": np.load(engine.file("golden_x_nchw.npy"))})[
        "logits"
    ]  # 16 rows, two batches
    np.testing.assert_allclose(answers, golden, atol=0.05)
    elsewhere = engine.spec.model_copy(update={"identity": engine.spec.identity | {"driver": "1.0"}})
    with pytest.raises(StageFailed, match="built for another machine"):
        config.load(engine.path, elsewhere, threads=1)
