"""Quantizing bare ONNX files: what comes out, what the gate says, which data fits, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed
from hpml.pipelines.quantize import samples, worker
from hpml.pipelines.quantize.job import Bounds, Judgement, Preprocessing, Quantized, QuantizeJob
from hpml.pipelines.quantize.judge import judge
from hpml.pipelines.quantize.page import how_in_words
from hpml.pipelines.quantize.worker import quantize
from tests.small_subjects import (
    transformer_samples,
    write_image_model,
    write_text_model,
    write_thief,
    write_transformer,
)

SHAPE = (3, 4, 4)


def write_classifier(file: Path, *, batch: int | str = "n") -> Path:
    """A linear layer over images whose weights are five prototypes: what is near to one is of its class."""
    return write_image_model(file, batch=batch)


def prototypes() -> np.ndarray:
    """The five images (3, 4, 4) that the layer of `write_image_model` looks for."""
    weights = np.random.default_rng(0).standard_normal((48, 5)).astype(np.float32)
    return weights.T.reshape(5, *SHAPE)


def classified(rows: int = 60) -> dict[str, np.ndarray]:
    """Noisy prototypes as x (rows, 3, 4, 4), and their classes as y."""
    y = np.arange(rows) % 5
    noise = np.random.default_rng(1).standard_normal((rows, *SHAPE)).astype(np.float32)
    return {"x": prototypes()[y] + 0.1 * noise, "y": y}


def builds(tmp_path: Path, file: Path, arrays: dict[str, Any] | Path, **fields: Any) -> dict[str, Quantized]:
    data = arrays if isinstance(arrays, Path) else tmp_path / "data.npz"
    if not isinstance(arrays, Path):
        np.savez(data, **arrays)
    job = QuantizeJob(file=file, data=data, **fields)
    told = quantize(job.model_dump(mode="json"), str(tmp_path))
    return {name: Quantized.model_validate(one) for name, one in told.items()}


def done(tmp_path: Path, file: Path, arrays: dict[str, Any] | Path, **fields: Any) -> Quantized:
    """The build to use without a measurement; it is int8.onnx."""
    name, found = next(iter(builds(tmp_path, file, arrays, **fields).items()))
    (tmp_path / f"{name}.onnx").rename(tmp_path / "int8.onnx")
    return found


def operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file).graph.node}


def test_an_int8_model_and_what_is_told_of_it(tmp_path: Path) -> None:
    file = write_classifier(tmp_path / "m.onnx")
    found = done(tmp_path, file, classified())
    judged = found.judgement
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators(tmp_path / "int8.onnx")
    assert (found.calibrated, judged.samples, found.quantized["MatMul"]) == (30, 30, 1)
    assert judged.accuracy_fp32 and judged.accuracy_int8 and judged.accuracy_change
    assert judged.accuracy_fp32.value == judged.accuracy_int8.value == 1.0 > judged.accuracy_fp32.low > 0.8
    assert judged.refusal == "" and 0 < judged.relative_error < 0.1
    assert found.activations == "uint8"
    assert "judged on 30 samples only" in found.notes
    weights = {tensor.name: tensor for tensor in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    scales = next(tensor for name, tensor in weights.items() if name == "w_scale")
    assert list(scales.dims) == [5]  # one for each channel


def test_both_kinds_of_activations_are_handed_over_unless_one_is_asked_for(tmp_path: Path) -> None:
    file = write_classifier(tmp_path / "m.onnx")
    assert list(builds(tmp_path, file, classified())) == ["uint8-activations", "int8-activations"]
    signed = builds(tmp_path, file, classified(), activations="int8", calibration="percentile")
    assert list(signed) == ["int8-activations"] and signed["int8-activations"].activations == "int8"


def test_of_both_only_those_that_pass_the_gate_are_handed_over(tmp_path: Path, monkeypatch: Any) -> None:
    file, judged = write_classifier(tmp_path / "m.onnx"), []

    def refuse_the_first(*arguments: Any) -> Judgement:
        judged.append(judge(*arguments))
        return judged[-1].model_copy(update={"refusal": "too far off" if len(judged) == 1 else ""})

    monkeypatch.setattr(worker, "judge", refuse_the_first)
    [(name, found)] = builds(tmp_path, file, classified()).items()
    assert name == "int8-activations" and not found.judgement.refusal
    assert "uint8 activations were refused: too far off" in found.notes
    judged.clear()
    never = Bounds(min_top1_agreement=1.0, max_accuracy_drop=0.0)
    monkeypatch.setattr(worker, "judge", lambda *given: judge(*given).model_copy(update={"refusal": "no"}))
    [(name, found)] = builds(tmp_path, file, classified(), bounds=never).items()
    assert name == "uint8-activations" and found.judgement.refusal == "no"


def test_metadata_is_kept(tmp_path: Path) -> None:
    model = onnx.load(write_classifier(tmp_path / "m.onnx"))
    model.metadata_props.add(key="classes", value="a,b,c,d,e")
    onnx.save(model, tmp_path / "m.onnx")
    done(tmp_path, tmp_path / "m.onnx", classified())
    kept = {entry.key: entry.value for entry in onnx.load(tmp_path / "int8.onnx").metadata_props}
    assert kept["classes"] == "a,b,c,d,e"


@pytest.mark.parametrize("batch", [1, 8])
def test_a_fixed_batch_is_filled(tmp_path: Path, batch: int) -> None:
    file = write_classifier(tmp_path / "m.onnx", batch=batch)
    found = done(tmp_path, file, classified(rows=21))
    assert found.judgement.samples == 11 and found.judgement.accuracy_int8
    assert found.calibrated == (10 if batch == 1 else 8)
    assert found.judgement.accuracy_int8.value == 1.0


def test_inputs_of_any_type_and_rank(tmp_path: Path) -> None:
    file = write_text_model(tmp_path / "t.onnx")
    rng = np.random.default_rng(0)
    arrays = {"ids": rng.integers(0, 2, (40, 7), np.int32), "mask": rng.random((40, 7), np.float64)}
    found = done(tmp_path, file, arrays)
    assert [(one.dtype, one.shape) for one in found.inputs] == [("int64", (7,)), ("float32", (7,))]
    assert found.sizes == {"seq": 7} and found.judgement.accuracy_fp32 is None


def test_masks_and_ids_stay_as_they_are(tmp_path: Path) -> None:
    """A mask that adds -1e38 to scores leaves no bit for them in a scale of 8 bits."""
    found = done(tmp_path, write_transformer(tmp_path / "t.onnx"), transformer_samples(60))
    same = found.judgement.top1_agreement
    assert same and same.value > 0.9 and found.quantized["MatMul"] == 4
    graph = onnx.load(tmp_path / "int8.onnx").graph
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert "x" in quantized and not quantized & {"mask", "padding", "flat_bias", "bias", "biased"}


def test_an_old_opset_is_converted(tmp_path: Path) -> None:
    model = onnx.load(write_classifier(tmp_path / "m.onnx"))
    model.opset_import[0].version = 11
    onnx.save(model, tmp_path / "m.onnx")
    assert (
        "the model was converted from opset 11 to 13"
        in done(tmp_path, tmp_path / "m.onnx", classified()).notes
    )


def test_labels_at_chance_are_doubted(tmp_path: Path) -> None:
    arrays = classified()
    found = done(tmp_path, write_classifier(tmp_path / "m.onnx"), {**arrays, "y": (arrays["y"] + 1) % 5})
    assert any("about chance" in note for note in found.notes)


# -------------------------------------------------------------------------------------------- what is refused


def custom(file: Path) -> Path:
    node = helper.make_node("Mine", ["x"], ["y"], domain="their.library")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([node], "custom", ends[:1], ends[1:])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("their.library", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), file)
    return file


def nothing_to_quantize(file: Path) -> Path:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "exp", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    return file


def quantized(file: Path) -> Path:
    done(file.parent, write_classifier(file.parent / "fp32.onnx"), classified())
    return (file.parent / "int8.onnx").rename(file)


def thief(file: Path) -> Path:
    (file.parent / "secret.bin").write_bytes(bytes(64))
    return write_thief(file.parent / "inside" / "m.onnx", location="../secret.bin")


def garbage(file: Path) -> Path:
    file.write_bytes(b"no protobuf")
    return file


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (custom, r"needs a library of its own: .*their.library:Mine"),
        (quantized, r"is quantized already: it has DequantizeLinear"),
        (nothing_to_quantize, "nothing in the model can be quantized: it has 1 Exp"),
        (thief, r"weights are said to be in '\.\./secret.bin', outside its folder"),
        (garbage, "is not an ONNX file"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_models_that_are_refused(tmp_path: Path, make: Any, why: str) -> None:
    file = make(tmp_path / "m.onnx")
    with pytest.raises(HpmlError, match=why):
        done(tmp_path, file, {"x": np.ones((8, 4), np.float32)})


def test_a_file_larger_than_any_onnx_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(3 * 2**30)  # a hole
    with pytest.raises(ConfigInvalid, match="no ONNX file has more than"):
        done(tmp_path, tmp_path / "m.onnx", classified())


def test_data_that_never_ends_is_not_read(tmp_path: Path) -> None:
    file = write_classifier(tmp_path / "m.onnx")
    os.mkfifo(tmp_path / "pipe.npz")
    for data, kind in ((Path("/dev/zero"), "a device"), (tmp_path / "pipe.npz", "a named pipe")):
        with pytest.raises(ConfigInvalid, match=f"cannot be used: it is {kind}, a regular file or a folder"):
            done(tmp_path, file, data)


def test_an_excluded_node_stays_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    model = onnx.load(write_classifier(tmp_path / "m.onnx"))
    model.graph.node[1].name = "head"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ConfigInvalid, match="no node 'hat' to exclude: it has head"):
        done(tmp_path, tmp_path / "m.onnx", classified(), excluded_nodes=("hat",))
    with pytest.raises(StageFailed, match="nothing in the model"):
        done(tmp_path, tmp_path / "m.onnx", classified(), excluded_nodes=("head",))


def test_samples_that_fp32_cannot_run_are_to_blame(tmp_path: Path) -> None:
    """While they calibrate, and while they judge; no node is to be excluded for them."""
    file = write_text_model(tmp_path / "t.onnx")
    fine, beyond = np.ones((20, 7), np.int64), np.full((20, 7), 9)
    for ids in ((beyond, beyond), (fine, beyond)):
        halves = np.where(
            np.isin(np.arange(40), calibrating_of(40))[:, None], *(np.tile(x, (2, 1)) for x in ids)
        )
        with pytest.raises(StageFailed, match="fp32 model itself cannot run on the samples") as caught:
            done(tmp_path, file, {"ids": halves, "mask": np.ones((40, 7), np.float32)})
        assert "out of data bounds" in caught.value.why and "exclude" not in caught.value.fix


def calibrating_of(rows: int) -> np.ndarray:
    return Numbered(None, rows).divided(256, seed=0)[0]


X = np.ones((8, *SHAPE), np.float32)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"z": X}, "no array for the input 'x'.*save the samples as x"),
        ({"x": X[:, :2]}, r"is float32 \(8, 2, 4, 4\), the model takes \(n, 3, 4, 4\)"),
        ({"x": X.astype(np.complex64)}, "is complex64, the model takes float32"),
        (
            {"x": np.where(np.arange(8)[:, None, None, None] == 3, np.nan, X)},
            "NaN.*in 1 of 8 rows, the first is 3",
        ),
        ({"x": X, "y": np.arange(7)}, "labels .* one whole number from 0 for each of 8"),
        ({"x": X, "y": np.arange(8)}, "labels go up to 7: the output 'logits' has 5 classes"),
        ({"x": X[:0]}, "no samples"),
        ({"x": X.transpose(0, 2, 3, 1) * 300}, "not float32 from 0 to 1: they go from 300 to 300"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], why: str) -> None:
    with pytest.raises(HpmlError, match=why):
        done(tmp_path, write_classifier(tmp_path / "m.onnx"), arrays)


# --------------------------------------------------------------------------------------------------- the gate


class Answers:
    """A session that answers what it is told to, batch after batch."""

    def __init__(self, answers: np.ndarray) -> None:
        self.outputs = ("out",)
        self._answers, self._row = answers, 0

    def run(self, feeds: Any) -> list[np.ndarray]:
        first, self._row = self._row, self._row + len(feeds["x"])
        return [self._answers[first : self._row]]


class Numbered(samples.Samples):
    def __init__(self, labels: np.ndarray | None, rows: int) -> None:
        self.labels, self.rows = labels, rows

    def feeds(self, rows: Any) -> dict[str, np.ndarray]:
        return {"x": rows}


def judged(fp32: Any, int8: Any, labels: Any = None, **bounds: float) -> Judgement:
    sessions: list[Any] = [Answers(np.asarray(answers, np.float32)) for answers in (fp32, int8)]
    rows = np.arange(len(fp32))
    told = Numbered(None if labels is None else np.asarray(labels), len(rows))
    return judge(sessions[0], sessions[1], told, rows, None, Bounds(**bounds))


def test_agreement_and_accuracy_are_judged_with_their_intervals() -> None:
    fp32 = np.eye(2)[np.arange(100) % 2]
    int8 = fp32.copy()
    int8[:4] = int8[:4, ::-1]
    found = judged(fp32, int8, labels=np.arange(100) % 2)
    assert found.accuracy_change and found.accuracy_change.low < -0.04 < found.accuracy_change.high
    assert "96.00% of the samples get the fp32 model's class, required 97.00%" in found.refusal
    assert "accuracy drops by 4.00 points to 96.00%, allowed 2.00" in found.refusal
    without = judged(fp32, int8, min_top1_agreement=0.9)
    assert without.accuracy_fp32 is None and without.top1_agreement and without.refusal == ""


def test_outputs_that_are_no_classes_are_judged_by_their_relative_error() -> None:
    fp32 = np.ones((10, 3, 2))
    assert judged(fp32, fp32 * 1.05).refusal == ""
    assert "relative error of 'out' is 0.2, allowed 0.1" in judged(fp32, fp32 * 1.2).refusal


def test_what_is_not_finite_is_refused_and_of_fp32_named() -> None:
    fp32 = np.eye(2)[np.arange(10) % 2]
    int8 = fp32.copy()
    int8[3] = np.nan
    found = judged(fp32, int8, labels=np.arange(10) % 2, min_top1_agreement=0, max_accuracy_drop=1)
    assert found.refusal == "it answers NaN 2 times in 20 numbers"
    assert found.accuracy_int8 and found.accuracy_int8.value == 0.9
    with pytest.raises(StageFailed, match=r"fp32 model itself answers NaN.*preprocessing"):
        judged(int8, fp32)


# -------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four pictures of 4x4 in colour in one folder; folders of classes with the same beside it."""
    rng = np.random.default_rng(0)
    for index in range(4):
        image = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        for folder in ("flat", f"classes/{'ab'[index % 2]}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / folder / f"{index}.png")
    return tmp_path


def test_pictures_are_read_as_prepare_reads_them(pictures: Path) -> None:
    file = write_classifier(pictures / "m.onnx")
    how = Preprocessing(mean=(0.5, 0.4, 0.3), std=(0.2,))
    found = samples.read(file, pictures / "flat", {}, how)
    assert found.labels is None and found.rows == 4
    x = found.feeds(np.arange(4))["x"]
    pixels = np.asarray(Image.open(pictures / "flat" / "2.png")).astype(np.float32)
    assert x.shape == (4, *SHAPE) and x.dtype == np.float32
    assert np.allclose(x[2], ((pixels / 255 - [0.5, 0.4, 0.3]) / 0.2).transpose(2, 0, 1), atol=1e-6)
    labelled = samples.read(file, pictures / "classes", {}, how)
    assert labelled.class_names == ("a", "b") and labelled.labels is not None
    assert labelled.labels.tolist() == [0, 0, 1, 1]


def test_arrays_of_pixels_are_preprocessed_like_pictures(pictures: Path) -> None:
    file = write_classifier(pictures / "m.onnx")
    names = sorted((pictures / "flat").iterdir())
    x = np.stack([np.asarray(Image.open(name)) for name in names])
    of_files = samples.read(file, pictures / "flat", {}, Preprocessing()).feeds(np.arange(4))["x"]
    for index, same in enumerate((x, x.transpose(0, 3, 1, 2), x.astype(np.float32) / 255)):
        np.savez(pictures / f"{index}.npz", x=same)
        read = samples.read(file, pictures / f"{index}.npz", {}, Preprocessing())
        assert np.allclose(read.feeds(np.arange(4))["x"], of_files, atol=1e-5)


def test_splits_of_the_data_are_kept(pictures: Path) -> None:
    arrays = classified(rows=30)
    np.savez(pictures / "s.npz", x_train=arrays["x"][:20], x_test=arrays["x"][20:])
    found = samples.read(write_classifier(pictures / "m.onnx"), pictures / "s.npz", {}, Preprocessing())
    calibrating, judging = found.divided(256, seed=0)
    assert sorted(calibrating) == list(range(20)) and list(judging) == list(range(20, 30))


@pytest.mark.parametrize(
    "parts", [{"x": 1}, {"x_train": 3, "x_test": 0}, {"x_train": 0, "x_test": 3}], ids=str
)
def test_no_sample_both_calibrates_and_judges(tmp_path: Path, parts: dict[str, int]) -> None:
    arrays = {name: classified()["x"][:rows] for name, rows in parts.items()}
    with pytest.raises(ConfigInvalid, match=r"too few samples: .* at least 2 are needed.* -> add samples"):
        done(tmp_path, write_classifier(tmp_path / "m.onnx"), arrays)


@pytest.mark.parametrize("batch", ["n", 8])
def test_two_samples_are_one_for_each(tmp_path: Path, batch: int | str) -> None:
    found = done(tmp_path, write_classifier(tmp_path / "m.onnx", batch=batch), classified(rows=2))
    assert "Calibrated on 1 sample, judged on 1 other sample." in how_in_words(found)


@pytest.mark.parametrize(
    ("how", "make", "why"),
    [
        (Preprocessing(mean=(0.5, 0.5)), write_classifier, "--mean has 2 values, a picture has 3 channels"),
        (Preprocessing(), write_text_model, "several inputs cannot be fed with pictures"),
        (Preprocessing(), nothing_to_quantize, "the input 'x' takes no pictures"),
    ],
)
def test_pictures_that_do_not_fit_the_model(pictures: Path, how: Any, make: Any, why: str) -> None:
    file = make(pictures / "m.onnx")
    with pytest.raises(ConfigInvalid, match=why):
        samples.read(file, pictures / "flat", {"seq": 4}, how)


def test_a_picture_that_is_none_is_named(pictures: Path) -> None:
    (pictures / "flat" / "9.png").write_bytes(b"none")
    found = samples.read(write_classifier(pictures / "m.onnx"), pictures / "flat", {}, Preprocessing())
    with pytest.raises(StageFailed, match=r"9.png cannot be read"):
        found.feeds(np.arange(5))
