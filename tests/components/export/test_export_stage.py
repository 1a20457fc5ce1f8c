"""What an export writes, and what its gate lets through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from components.artifacts import open_artifact, read_manifest
from components.compress import Quantize
from components.compress import stage as compress
from components.contract import Output
from components.errors import ConfigInvalid, ExitCode, GateFailed, StageFailed
from components.export import stage as export
from components.export.gate import compare, objections
from components.images import load_split, predict_split, top1_accuracy
from components.targets import TOLERANCES, Eager, Onnx, TensorRT, Tolerance


def test_engine_is_described_and_its_figures_are_its_own(onnx_fp32, small_model, digits_data):
    spec = onnx_fp32.spec
    assert (spec.status, spec.file, spec.precision) == ("built", "model.onnx", "fp32")
    assert spec.size_bytes == onnx_fp32.file("model.onnx").stat().st_size
    assert (spec.parameters, spec.macs) == (small_model.spec.parameters, small_model.spec.macs)
    assert spec.identity["runtime"].startswith("onnxruntime ")
    assert 0 < spec.max_abs_error < 1e-4
    logits = np.load(onnx_fp32.file("test_logits.npy"))
    images, labels = load_split(digits_data, "test")
    assert logits.dtype == np.float32 and logits.shape == (len(labels), 10)
    assert spec.accuracy_top1 == top1_accuracy(logits, labels) == small_model.spec.accuracy_top1
    session = Onnx().load(onnx_fp32.path, spec, threads=1)
    np.testing.assert_allclose(predict_split(session.predict, images, spec.input), logits, atol=1e-5)


def test_golden_samples_are_the_engines_own_answers(onnx_int8):
    session = Onnx().load(onnx_int8.path, onnx_int8.spec, threads=1)
    golden_x_nchw = np.load(onnx_int8.file("golden_x_nchw.npy"))
    assert golden_x_nchw.shape == (16, 1, 8, 8)
    answers = session.predict(golden_x_nchw)
    np.testing.assert_array_equal(answers, np.load(onnx_int8.file("golden_logits.npy")))
    of_the_split = np.load(onnx_int8.file("test_logits.npy"))
    spread = of_the_split[np.linspace(0, len(of_the_split) - 1, 16).astype(int)]
    np.testing.assert_allclose(answers, spread, atol=1e-5)


def test_int8_is_smaller_and_as_accurate(onnx_fp32, onnx_int8):
    assert onnx_int8.spec.precision == "int8"
    assert onnx_int8.spec.size_bytes < 0.5 * onnx_fp32.spec.size_bytes
    assert onnx_int8.spec.accuracy_top1 >= onnx_fp32.spec.accuracy_top1 - 0.02
    assert onnx_int8.spec.top1_agreement >= 0.97
    assert onnx_int8.spec.max_abs_error > onnx_fp32.spec.max_abs_error


def test_eager_is_the_network_itself(run_stage, small_model, digits_data):
    engine = run_stage(export.run, Eager(device="cpu"), model=small_model, data=digits_data)
    assert engine.spec.max_abs_error < 1e-5 and engine.spec.top1_agreement == 1
    assert engine.spec.size_bytes == sum(
        engine.file(name).stat().st_size for name in ("model.json", "model.safetensors")
    )


def test_the_same_export_writes_the_same_artifact(run_stage, onnx_fp32, small_model, digits_data):
    again = run_stage(export.run, Onnx(), model=small_model, data=digits_data)
    assert again.digest == onnx_fp32.digest


def test_an_engine_beyond_its_tolerance_is_kept_but_rejected(run_stage, tmp_path, small_model, digits_data):
    strict = Onnx(tolerance=Tolerance(max_abs_error=0))
    with pytest.raises(GateFailed, match=r"a logit is off by .*, allowed 0") as failure:
        run_stage(export.run, strict, model=small_model, data=digits_data)
    assert failure.value.exit_code == ExitCode.GATE_FAILED
    rejected = tmp_path / "stage-1"
    assert "allowed 0" in read_manifest(rejected).rejected
    with pytest.raises(StageFailed, match="rejected by a gate"):
        open_artifact(rejected, kind="engine")


class _Broken(Onnx):
    """An exporter that zeroes the weights of the head after a clean build."""

    def build(self, model, data, out):
        import onnx
        from onnx import numpy_helper

        built = super().build(model, data, out)
        file = out.path / built.file
        graph = onnx.load(file)
        for tensor in graph.graph.initializer:
            if tensor.name == "head.weight":
                zeros = np.zeros_like(numpy_helper.to_array(tensor))
                tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
        file.write_bytes(graph.SerializeToString())
        return built


def test_a_corrupted_engine_is_rejected_with_what_was_measured(tmp_path, small_model, digits_data):
    place, scratch = tmp_path / "engine", tmp_path / "scratch"
    place.mkdir(), scratch.mkdir()
    result = export.run(_Broken(), model=small_model, data=digits_data, out=Output(place, scratch, 2))
    assert "a logit is off by" in result.rejected
    assert "of the test images get the network's class, required 99.90%" in result.rejected
    assert "accuracy drops by" in result.rejected
    assert result.spec.accuracy_top1 < 0.5


class _Annotated(Onnx):
    """An exporter that leaves something beside the engine."""

    def build(self, model, data, out):
        (out.path / "beside.txt").write_text("of no use to the runtime")
        return replace(super().build(model, data, out), companions=("beside.txt",))


def test_what_no_runtime_opens_is_not_of_the_engines_size(tmp_path, small_model, digits_data):
    place, scratch = tmp_path / "engine", tmp_path / "scratch"
    place.mkdir(), scratch.mkdir()
    result = export.run(_Annotated(), model=small_model, data=digits_data, out=Output(place, scratch, 2))
    assert result.spec.size_bytes == (place / "model.onnx").stat().st_size


def test_a_missing_gpu_is_reported_not_built(run_stage, small_model, digits_data, monkeypatch):
    monkeypatch.setattr("components.hardware.gpu_names", tuple)
    engine = run_stage(export.run, TensorRT(), model=small_model, data=digits_data)
    assert (engine.spec.status, engine.spec.reason) == ("not built", "this machine has no NVIDIA GPU")
    assert not engine.manifest.files and engine.spec.size_bytes == 0


def test_a_missing_gpu_is_refused_where_the_recipe_insists(run_stage, small_model, digits_data, monkeypatch):
    monkeypatch.setattr("components.hardware.gpu_names", tuple)
    with pytest.raises(ConfigInvalid, match="no NVIDIA GPU") as failure:
        run_stage(export.run, TensorRT(when_absent="refuse"), model=small_model, data=digits_data)
    assert failure.value.exit_code == ExitCode.CONFIG_INVALID


def test_eager_has_no_int8(run_stage, quantized_model, digits_data):
    engine = run_stage(export.run, Eager(), model=quantized_model, data=digits_data)
    assert engine.spec.status == "not built" and "no int8 kernels" in engine.spec.reason


def test_tolerances_can_be_set_one_by_one():
    merged = Tolerance(max_accuracy_drop=0.5).or_else(TOLERANCES["fp32"])
    assert merged.max_accuracy_drop == 0.5
    assert merged.max_abs_error == TOLERANCES["fp32"].max_abs_error


LOGITS = hnp.arrays(np.float32, (5, 3), elements=st.floats(-100, 100, width=32))


@given(reference=LOGITS, labels=hnp.arrays(np.int64, 5, elements=st.integers(0, 2)))
def test_a_network_agrees_with_itself(reference, labels):
    agreement = compare(reference, reference, labels)
    assert objections(agreement, TOLERANCES["fp32"]) == ""
    assert agreement.max_abs_error == 0 and agreement.accuracy_drop == 0


@given(reference=LOGITS, where=st.integers(0, 14))
def test_a_logit_that_is_no_number_is_always_refused(reference, where):
    logits = reference.copy()
    logits.flat[where] = np.nan
    agreement = compare(logits, reference, np.zeros(5, np.int64))
    assert np.isfinite(agreement.max_abs_error)
    assert "a logit is off by" in objections(agreement, TOLERANCES["fp32"])


def test_every_bound_is_judged_alone():
    reference = np.eye(4, dtype=np.float32)
    labels = np.arange(4)
    logits = reference.copy()
    logits[0] = [0, 1, 0, 0]
    agreement = compare(logits, reference, labels)
    assert (agreement.accuracy_drop, agreement.top1_agreement, agreement.max_abs_error) == (0.25, 0.75, 1.0)
    assert (
        objections(agreement, Tolerance(max_abs_error=1, min_top1_agreement=0.75, max_accuracy_drop=0.25))
        == ""
    )
    assert "logit" in objections(agreement, Tolerance(max_abs_error=0.9))
    assert "class" in objections(agreement, Tolerance(min_top1_agreement=0.76))
    assert "accuracy" in objections(agreement, Tolerance(max_accuracy_drop=0.24))


def test_a_better_engine_is_no_accuracy_drop():
    reference = np.eye(2, dtype=np.float32)
    agreement = compare(reference[::-1].copy(), reference, np.array([1, 0]))
    assert agreement.accuracy_drop == -1
    assert objections(agreement, Tolerance(max_accuracy_drop=0)) == ""


def test_the_faster_activations_are_kept_and_what_was_measured_is_written_down(onnx_int8):
    metrics, kept = onnx_int8.manifest.metrics, onnx_int8.spec.identity["activations"]
    other = {"uint8": "int8", "int8": "uint8"}[kept]
    measured = {kind: metrics[f"latency_ms_{kind}_activations"] for kind in (kept, other)}
    assert min(measured.values()) > 0
    assert measured[kept] * 0.95 <= measured[other]
    assert any(kept in note and "measured" in note for note in onnx_int8.spec.notes)
    zero_points = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(onnx_int8.file("model.onnx")).graph.initializer
        if tensor.name.endswith("_zero_point") and not tensor.dims
    ]
    assert {str(zero_point.dtype) for zero_point in zero_points} == {kept}


def test_the_spec_of_the_model_reaches_the_engine(onnx_int8):
    stored = {tensor.name for tensor in onnx.load(onnx_int8.file("model.onnx")).graph.initializer}
    assert "features.0.weight" in stored and "features.0.weight_quantized" not in stored
    assert {"features.3.weight_quantized", "features.6.weight_quantized"} <= stored


def test_activations_that_the_recipe_chose_are_not_measured(run_stage, small_model, digits_data):
    config = Quantize(activations="int8", calibration_samples=32)
    model = run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)
    engine = run_stage(export.run, Onnx(), model=model, data=digits_data)
    assert engine.spec.identity["activations"] == "int8"
    assert not any("latency" in name for name in engine.manifest.metrics)
