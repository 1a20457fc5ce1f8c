"""Engines of OpenVINO: the graphs of the target `onnx`, in the precision asked for, and nothing reported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpml.components.compress import Quantize
from hpml.components.compress import stage as compress
from hpml.components.export import stage as export
from hpml.core import hardware
from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.targets import AnyTarget, Onnx, OpenVino
from hpml.targets.openvino import OpenVinoSession
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of

ROOT = Path(__file__).parents[3]
HAS_BF16 = not OpenVino(float_precision="bf16").missing()


@pytest.fixture(scope="module")
def quantized(run_stage_once, small_model, digits_data):
    config = Quantize(calibration_samples=64)
    return run_stage_once(compress.run, config, model=small_model, teacher=small_model, data=digits_data)


@pytest.fixture(scope="module")
def fp32(run_stage_once, small_model, digits_data):
    return run_stage_once(export.run, OpenVino(), model=small_model, data=digits_data)


@pytest.fixture
def x_nchw(digits_data, fp32):
    task = task_of(fp32.spec.task)
    return task.features(rows_of(task.stored(digits_data, "validation"), slice(32)))["x_nchw"]


def test_the_graph_is_that_of_onnx_runtime_and_the_runtime_is_named(
    run_stage, small_model, digits_data, fp32
):
    onnx = run_stage(export.run, Onnx(device="cpu"), model=small_model, data=digits_data)
    assert fp32.manifest.files[fp32.spec.file].sha256 == onnx.manifest.files[onnx.spec.file].sha256
    assert fp32.spec.identity["runtime"].startswith("openvino 20")
    assert fp32.spec.precision == "fp32" and fp32.spec.max_abs_error < 1e-3


def test_every_build_of_int8_agrees_with_the_network(run_stage, quantized, digits_data):
    engine = run_stage(export.run, OpenVino(), model=quantized, data=digits_data)
    assert [build.precision for build in (engine.spec, *engine.spec.variants.values())] == ["int8", "int8"]
    for build in (engine.spec, *engine.spec.variants.values()):
        assert build.identity["runtime"].startswith("openvino 20") and build.identity["activations"]
        assert build.agreement >= 0.97


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_bf16_is_another_precision_under_a_name_of_its_own(run_stage, small_model, digits_data, fp32, x_nchw):
    config = validate(AnyTarget, {"target": "openvino", "float_precision": "bf16"}, where="targets")
    engine = run_stage(export.run, config, model=small_model, data=digits_data)
    assert config.label == "openvino-bf16" and engine.spec.precision == "bf16"
    error = np.abs(
        config.load(engine.path, engine.spec, threads=1).run({"x_nchw": x_nchw})["logits"]
        - OpenVino().load(fp32.path, fp32.spec, threads=1).run({"x_nchw": x_nchw})["logits"]
    ).max()
    assert 1e-3 < error < 1  # left alone, OpenVINO computes fp32 engines in bf16, too


def test_answers_of_one_request_outlive_the_next(fp32, x_nchw):
    session = OpenVino().load(fp32.path, fp32.spec, threads=1)
    first = session.run({"x_nchw": x_nchw[:1]})["logits"]
    kept = first.copy()
    session.run({"x_nchw": x_nchw[1:2]})["logits"]
    assert (first == kept).all()


def test_what_this_machine_lacks_is_said(monkeypatch, run_stage, small_model, digits_data, fp32):
    with monkeypatch.context() as here:
        here.setattr(hardware, "cpu_flags", lambda: ("avx2",))
        engine = run_stage(export.run, OpenVino(float_precision="bf16"), model=small_model, data=digits_data)
        assert engine.spec.status == "not built" and "no bf16 instructions" in engine.spec.reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'hpml-pipeline[openvino]'" in OpenVino().missing()
    with pytest.raises(StageFailed, match="openvino is not installed"):
        OpenVino().load(fp32.path, fp32.spec, threads=1)


def test_a_file_that_is_no_graph_ends_in_one_line(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(StageFailed, match="OpenVINO cannot load") as refused:
        OpenVinoSession(tmp_path / "model.onnx", threads=1, float_precision="fp32")
    assert "\n" not in str(refused.value)


def test_its_reporting_package_is_not_imported(fp32):
    script = (
        "import sys; from pathlib import Path; from hpml.targets.openvino import OpenVinoSession;"
        f"OpenVinoSession(Path({str(fp32.path / fp32.spec.file)!r}), threads=1, float_precision='fp32');"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry') and sys.modules[name]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
