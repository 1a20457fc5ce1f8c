"""What an export writes, and what its gate lets through."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hpml.artifacts.engine import build_of, copy_engine
from hpml.artifacts.folder import open_artifact, read_manifest
from hpml.components.compress import Quantize
from hpml.components.compress import stage as compress
from hpml.components.export import gate
from hpml.components.export import stage as export
from hpml.components.export.gate import objections
from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid, ExitCode, GateFailed, StageFailed
from hpml.measuring.subjects import EngineSubject
from hpml.targets import TOLERANCES, Eager, Onnx, TensorRT, Tolerance
from hpml.tasks import task_of
from hpml.tasks.judging import JUDGED, judge
from tests.image_tasks import image_task


def test_engine_is_described_and_its_figures_are_its_own(onnx_fp32, small_model, digits_data):
    spec = onnx_fp32.spec
    assert (spec.status, spec.file, spec.precision) == ("built", "model.onnx", "fp32")
    assert spec.size_bytes == onnx_fp32.file("model.onnx").stat().st_size
    assert (spec.parameters, spec.macs) == (small_model.spec.parameters, small_model.spec.macs)
    assert spec.identity["runtime"].startswith("onnxruntime ")
    assert 0 < spec.max_abs_error < 1e-4
    judged = np.load(onnx_fp32.file(JUDGED))
    logits = judged["logits"]
    stored = task_of(spec.task).stored(digits_data, "validation")
    assert logits.dtype == np.float32 and logits.shape == (len(stored["labels"]), 10)
    recognised = logits.argmax(axis=1) == stored["labels"]
    np.testing.assert_array_equal(
        judged["accuracy_top1"], np.stack([recognised, np.ones_like(recognised)], 1)
    )
    assert spec.quality == {"accuracy_top1": recognised.mean()} == small_model.spec.quality
    session = Onnx().load(onnx_fp32.path, spec, threads=1)
    x_nchw = task_of(spec.task).features(stored)["x_nchw"]
    np.testing.assert_allclose(session.run({"x_nchw": x_nchw})["logits"], logits, atol=1e-5)


def test_golden_samples_are_the_engines_own_answers(onnx_int8):
    session = Onnx().load(onnx_int8.path, onnx_int8.spec, threads=1)
    golden_x_nchw = np.load(onnx_int8.file("golden_x_nchw.npy"))
    assert golden_x_nchw.shape == (16, 1, 8, 8)
    answers = session.run({"x_nchw": golden_x_nchw})["logits"]
    np.testing.assert_array_equal(answers, np.load(onnx_int8.file("golden_logits.npy")))
    of_the_split = np.load(onnx_int8.file(JUDGED))["logits"]
    spread = of_the_split[np.linspace(0, len(of_the_split) - 1, 16).astype(int)]
    np.testing.assert_allclose(answers, spread, atol=1e-5)


def test_int8_is_smaller_and_as_accurate(onnx_fp32, onnx_int8):
    assert onnx_int8.spec.precision == "int8"
    assert onnx_int8.spec.size_bytes < 0.5 * onnx_fp32.spec.size_bytes
    assert onnx_int8.spec.quality["accuracy_top1"] >= onnx_fp32.spec.quality["accuracy_top1"] - 0.02
    assert onnx_int8.spec.agreement >= 0.97
    assert onnx_int8.spec.max_abs_error > onnx_fp32.spec.max_abs_error


def test_eager_is_the_network_itself(run_stage, small_model, digits_data):
    engine = run_stage(export.run, Eager(device="cpu"), model=small_model, data=digits_data)
    assert engine.spec.max_abs_error < 1e-5 and engine.spec.agreement == 1
    assert engine.spec.size_bytes == sum(
        engine.file(name).stat().st_size for name in ("model.json", "model.safetensors")
    )


def test_the_same_export_writes_the_same_artifact(run_stage, onnx_fp32, small_model, digits_data):
    again = run_stage(export.run, Onnx(), model=small_model, data=digits_data)
    assert again.digest == onnx_fp32.digest


def test_an_engine_beyond_its_tolerance_is_kept_but_rejected(run_stage, tmp_path, small_model, digits_data):
    strict = Onnx(tolerance=Tolerance(max_abs_error=0))
    with pytest.raises(GateFailed, match=r"an output is off by .*, allowed 0") as failure:
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
    assert "an output is off by" in result.rejected
    assert "of what it decides is what the network decides, required 99.90%" in result.rejected
    assert "top-1 is worse by" in result.rejected
    assert result.spec.quality["accuracy_top1"] < 0.5


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
    monkeypatch.setattr("hpml.core.hardware.gpu_names", tuple)
    engine = run_stage(export.run, TensorRT(), model=small_model, data=digits_data)
    assert (engine.spec.status, engine.spec.reason) == ("not built", "this machine has no NVIDIA GPU")
    assert not engine.manifest.files and engine.spec.size_bytes == 0


def test_a_missing_gpu_is_refused_where_the_recipe_insists(run_stage, small_model, digits_data, monkeypatch):
    monkeypatch.setattr("hpml.core.hardware.gpu_names", tuple)
    with pytest.raises(ConfigInvalid, match="no NVIDIA GPU") as failure:
        run_stage(export.run, TensorRT(when_absent="refuse"), model=small_model, data=digits_data)
    assert failure.value.exit_code == ExitCode.CONFIG_INVALID


def test_eager_has_no_int8(run_stage, quantized_model, digits_data):
    engine = run_stage(export.run, Eager(), model=quantized_model, data=digits_data)
    assert engine.spec.status == "not built" and "no int8 kernels" in engine.spec.reason


def test_tolerances_can_be_set_one_by_one():
    merged = Tolerance(max_quality_loss=0.5).or_else(TOLERANCES["fp32"])
    assert merged.max_quality_loss == 0.5
    assert merged.max_abs_error == TOLERANCES["fp32"].max_abs_error


def test_tolerances_by_their_names_of_before():
    of_before = Onnx.model_validate({"tolerance": {"max_accuracy_drop": 0.5, "min_top1_agreement": 0.9}})
    assert of_before == Onnx(tolerance=Tolerance(max_quality_loss=0.5, min_agreement=0.9))


def test_an_engine_of_before_there_were_tasks_is_read(onnx_fp32):
    spec = onnx_fp32.spec
    task = task_of(spec.task)
    of_before = spec.model_dump(
        mode="json", exclude={"task", "operations", "graphs", "quality", "agreement", "generation_agreement"}
    ) | {
        "class_names": list(task.class_names),
        "input": {
            "name": "x_nchw",
            "shape_chw": list(task.shape_chw),
            "mean": list(task.mean),
            "std": list(task.std),
            "pictures": None,
        },
        "accuracy_top1": spec.quality["accuracy_top1"],
        "top1_agreement": spec.agreement,
    }
    read = type(spec).model_validate(of_before)
    assert task_of(read.task) == task
    assert (read.quality, read.agreement, read.size_bytes) == (spec.quality, spec.agreement, spec.size_bytes)
    [(now, then)] = zip(spec.operations, read.operations, strict=True)
    assert [(one.name, one.shape) for one in (*now.inputs, *now.outputs)] == [
        (one.name, one.shape) for one in (*then.inputs, *then.outputs)
    ]


class _Answers:
    """Gives these logits to whatever it is asked."""

    def __init__(self, logits):
        self._logits = logits

    def run(self, feeds, operation="predict"):
        return {"logits": self._logits}


def compare(logits, reference, labels):
    """The judgements of an engine that gives `logits`, and of its network, for labelled images."""
    task = image_task(classes=logits.shape[1])
    stored = {"images": np.zeros((len(labels), 8, 8, 1), np.uint8), "labels": labels}
    network, engines = judge(task, _Answers(reference), {"": _Answers(logits)}, stored)
    return task, engines[""], network


def loss(task, engine, network):
    return task.metric.loss(*(one.quality["accuracy_top1"] for one in (engine, network)))


LOGITS = hnp.arrays(np.float32, (5, 3), elements=st.floats(-100, 100, width=32))


@given(reference=LOGITS, labels=hnp.arrays(np.int64, 5, elements=st.integers(0, 2)))
def test_a_network_agrees_with_itself(reference, labels):
    compared = compare(reference, reference, labels)
    assert objections(*compared, TOLERANCES["fp32"]) == ""
    assert compared[1].max_abs_error == 0 and compared[1].agreement == 1 and loss(*compared) == 0


@given(reference=LOGITS, where=st.integers(0, 14))
def test_a_logit_that_is_no_number_is_always_refused(reference, where):
    logits = reference.copy()
    logits.flat[where] = np.nan
    compared = compare(logits, reference, np.zeros(5, np.int64))
    assert np.isfinite(compared[1].max_abs_error)
    assert "an output is off by" in objections(*compared, TOLERANCES["fp32"])


def test_every_bound_is_judged_alone():
    reference = np.eye(4, dtype=np.float32)
    labels = np.arange(4)
    logits = reference.copy()
    logits[0] = [0, 1, 0, 0]
    compared = compare(logits, reference, labels)
    assert (loss(*compared), compared[1].agreement, compared[1].max_abs_error) == (0.25, 0.75, 1.0)
    assert objections(*compared, Tolerance(max_abs_error=1, min_agreement=0.75, max_quality_loss=0.25)) == ""
    assert objections(*compared, Tolerance(max_abs_error=0.9)) == "an output is off by 1, allowed 0.9"
    assert (
        objections(*compared, Tolerance(min_agreement=0.76))
        == "75.00% of what it decides is what the network decides, required 76.00%"
    )
    assert (
        objections(*compared, Tolerance(max_quality_loss=0.24))
        == "top-1 is worse by 25.00 points, 75.00%, allowed 24.00 points"
    )


def test_a_better_engine_is_no_loss():
    reference = np.eye(2, dtype=np.float32)
    compared = compare(reference[::-1].copy(), reference, np.array([1, 0]))
    assert loss(*compared) == -1
    assert objections(*compared, Tolerance(max_quality_loss=0)) == ""


SIGNED = "int8-activations"


def test_signed_and_unsigned_activations_are_handed_over(onnx_int8):
    """Which are faster is for the benchmark to say: a timing beside other steps would be the machine's."""
    spec, signed = onnx_int8.spec, onnx_int8.spec.variants[SIGNED]
    assert list(spec.variants) == [SIGNED] and not signed.variants
    assert (spec.identity["activations"], signed.identity["activations"]) == ("uint8", "int8")
    assert not any("latency" in name for name in onnx_int8.manifest.metrics)
    for name in ("", SIGNED):
        file = onnx_int8.file(f"{name}/model.onnx".lstrip("/"))
        zero_points = [
            onnx.numpy_helper.to_array(tensor)
            for tensor in onnx.load(file).graph.initializer
            if tensor.name.endswith("_zero_point") and not tensor.dims
        ]
        told = spec.of_variant(name)
        assert {str(zero_point.dtype) for zero_point in zero_points} == {told.identity["activations"]}
        assert told.size_bytes == file.stat().st_size  # of one build, not of both
        assert told.agreement >= 0.97


def test_each_build_is_a_candidate_and_checked_by_its_own_golden_outputs(onnx_int8, tmp_path):
    folder = shutil.copytree(onnx_int8.path, tmp_path / "engine")
    golden = np.load(folder / SIGNED / "golden_logits.npy")
    np.save(folder / SIGNED / "golden_logits.npy", golden + 1)
    subject = EngineSubject(folder=folder)
    settings = subject.candidates(2)
    assert [one.variant for one in settings] == [""] * 3 + [SIGNED] * 3
    assert str(settings[3]) == f"{settings[0]}, int8 activations"
    subject.check(subject.open(threads=1))
    signed = subject.of_variant(settings[3].variant)
    (folder / "model.onnx").write_bytes(bytes((folder / "model.onnx").stat().st_size))
    opened = signed.open(threads=1, spinning=False)
    np.testing.assert_array_equal(
        opened.predict({"x_nchw": np.load(folder / "golden_x_nchw.npy")})["logits"], golden
    )
    with pytest.raises(StageFailed, match="golden outputs"):
        signed.check(opened)


def test_a_build_that_the_gate_refuses_is_left_out(run_stage, quantized_model, digits_data, monkeypatch):
    objections = gate.objections
    judged = []

    def refuse_the_first(*arguments):
        judged.append(arguments)
        return "too far off" if len(judged) == 1 else objections(*arguments)

    monkeypatch.setattr(gate, "objections", refuse_the_first)
    engine = run_stage(export.run, Onnx(), model=quantized_model, data=digits_data)
    assert not engine.spec.variants and engine.spec.identity["activations"] == "uint8"
    assert "there is no build with int8 activations: too far off" in engine.spec.notes
    assert not any(SIGNED in name for name in engine.manifest.files)


def test_a_build_is_an_artifact_of_its_own(onnx_int8):
    signed = build_of(onnx_int8, SIGNED)
    assert signed.spec.identity["activations"] == "int8" and signed.digest == onnx_int8.digest
    assert signed.file(JUDGED) == onnx_int8.path / SIGNED / JUDGED
    assert build_of(onnx_int8, "") is onnx_int8


@pytest.mark.parametrize("variant", ["", SIGNED])
def test_one_build_is_shipped(onnx_int8, tmp_path, variant):
    spec = copy_engine(onnx_int8, variant, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "model.onnx",
        "golden_x_nchw.npy",
        "golden_logits.npy",
        "drift.json",
        JUDGED,
    }
    for name in ("model.onnx", "golden_logits.npy", "drift.json", JUDGED):
        assert (tmp_path / name).read_bytes() == (onnx_int8.path / variant / name).read_bytes()
    assert spec == onnx_int8.spec.of_variant(variant) and not spec.variants


def test_the_spec_of_the_model_reaches_the_engine(onnx_int8):
    stored = {tensor.name for tensor in onnx.load(onnx_int8.file("model.onnx")).graph.initializer}
    assert "features.0.weight" in stored and "features.0.weight_quantized" not in stored
    assert {"features.3.weight_quantized", "features.6.weight_quantized"} <= stored


def test_activations_that_the_recipe_chose_are_the_only_ones(run_stage, small_model, digits_data):
    config = Quantize(activations="int8", calibration_samples=32)
    model = run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)
    engine = run_stage(export.run, Onnx(), model=model, data=digits_data)
    assert engine.spec.identity["activations"] == "int8" and not engine.spec.variants
