"""`hpml bench --data FILE.npz`: real samples, whatever may be wrong with them, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from hpml.core.errors import ConfigInvalid, GateFailed, HpmlError
from hpml.measuring.subjects import TorchSubject
from hpml.pipelines.__main__ import main
from hpml.pipelines.bench import measurable, sample_file
from hpml.pipelines.bench import session as bench
from hpml.pipelines.bench.measurable import Hints, Measurable
from hpml.pipelines.bench.record import read_record
from hpml.pipelines.bench.sample_file import SampleFile
from tests.small_subjects import (
    MODEL_OF_THE_USER,
    inference_server,
    transformer_samples,
    write_image_model,
    write_text_model,
    write_transformer,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformer(tmp_path_factory.mktemp("model") / "t.onnx")


def found_with(
    place: Path, arrays: Mapping[str, Any], *arguments: str | Path, **hints: Any
) -> tuple[dict[str, Measurable], SampleFile]:
    np.savez(place / "data.npz", **arrays)
    samples = SampleFile(place / "data.npz")
    given = [str(argument) for argument in arguments]
    return measurable.measurables(given, Hints(place, samples=samples, **hints)), samples


def inputs_of(place: Path, found: dict[str, Measurable], samples: SampleFile | None) -> dict[str, Any]:
    """The arrays that are written for the processes, by the names of the inputs of the first of `found`."""
    options = bench.BenchOptions(batches=(1, 4))
    bench._write_inputs(place / "inputs.npz", found, bench._config(found, options), samples)
    with np.load(place / "inputs.npz") as arrays:
        return {tensor.name: arrays[tensor.array] for tensor in next(iter(found.values())).signature.inputs}


def test_samples_become_the_requests_and_say_open_sizes(model: Path, tmp_path: Path) -> None:
    given = transformer_samples()
    found, samples = found_with(tmp_path, {**given, "y": np.zeros(6, np.int64)}, model)
    written = inputs_of(tmp_path, found, samples)
    assert all((written[name] == given[name]).all() for name in given)
    [first, *_] = bench.inputs_in_words(found, samples)
    assert first == f"input_ids int64 (batch, 7): 6 samples of {samples.file}"


def test_types_are_cast_where_every_number_stays_what_it_is(model: Path, tmp_path: Path) -> None:
    given = {name: array.astype(np.int16) for name, array in transformer_samples().items()}
    given["attention_mask"] = given["attention_mask"].astype(bool)
    found, samples = found_with(tmp_path, given, model)
    assert {array.dtype for array in inputs_of(tmp_path, found, samples).values()} == {np.dtype(np.int64)}
    narrow = write_transformer(tmp_path / "i32.onnx", ids=TensorProto.INT32)
    found, samples = found_with(tmp_path, transformer_samples(), narrow, model)
    assert {array.dtype for array in inputs_of(tmp_path, found, samples).values()} == {np.dtype(np.int32)}
    takes = [sorted(tensor.samples for tensor in item.signature.inputs) for item in found.values()]
    assert takes[0] == takes[1]  # so their outputs are compared


def changed(**arrays: Any) -> dict[str, Any]:
    given = {**transformer_samples(), **arrays}
    return {name: array for name, array in given.items() if array is not None}


def with_id(row: int, value: int) -> Any:
    ids = transformer_samples()["input_ids"].copy()
    ids[row, 3] = value
    return ids


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            changed(position_ids=None),
            r"no array for the input 'position_ids' of .*it has input_ids, attention_",
        ),
        (changed(idz=np.zeros((6, 7), np.int64)), "arrays that nothing takes: idz"),
        (changed(input_ids=with_id(4, 20)), r"row 4 holds 20, allowed are 0 to 19 \(it indexes 'tokens'"),
        (changed(input_ids=with_id(2, -1)), r"row 2 holds -1, allowed are 0 to 19"),
        (
            changed(attention_mask=np.full((6, 7), 2)),
            r"'attention_mask' of .* is no mask: row 0 holds 2, allowed are 0 and 1 \(.*; 6 of 6 rows hold",
        ),
        (changed(input_ids=np.zeros((6, 7))), "it is float64, its input 'input_ids' takes int64"),
        (changed(input_ids=np.full((6, 7), 2**63, np.uint64)), "it is uint64"),
        (changed(input_ids=np.zeros((6, 7, 1), np.int64)), r"it is \(6, 7, 1\), its input 'input_ids' takes"),
        (
            changed(attention_mask=np.ones((6, 5), np.int64)),
            r"one size 'seq', and is given two: 7 by 'input_",
        ),
        (
            changed(attention_mask=np.ones((5, 7), np.int64)),
            "not equally many: input_ids 6, attention_mask 5",
        ),
        ({name: array[:0] for name, array in transformer_samples().items()}, "have no samples"),
        (changed(input_ids=np.full((6, 7), "a")), "is <U1: allowed are"),
        (changed(input_ids=np.zeros((6, 7), complex)), "is complex128: allowed are"),
        (changed(input_ids=np.int64(1)), "no samples"),
        ({}, "have no samples"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    model: Path, tmp_path: Path, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigInvalid, match=why):
        found_with(tmp_path, given, model)


def test_a_size_of_the_command_line_that_the_samples_contradict(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="30 by --dim, 7 by 'input_ids'"):
        found_with(tmp_path, transformer_samples(), model, sizes={"seq": 30})


@pytest.mark.parametrize("content", ["objects", "text", "short", "folder", "nothing"])
def test_a_file_that_is_no_npz_of_numbers_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "data.npz"
    if content == "objects":
        np.savez(file, x=np.array([{}, []], object))
    elif content == "text":
        file.write_text("x")
    elif content == "short":
        np.savez(file, x=np.zeros(1000))
        file.write_bytes(file.read_bytes()[:500])
    elif content == "folder":
        file.mkdir()
    with pytest.raises(HpmlError, match=r"data\.npz (is refused|cannot be used)"):
        SampleFile(file)


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    file = write_image_model(tmp_path / "m.onnx")
    images = np.ones((5, 3, 4, 4), np.float32)
    images[3, 0, 0, 0] = np.nan
    with pytest.raises(
        ConfigInvalid, match=r"'x' of .* holds NaN or infinity: in 1 of 5 rows, the first is row 3"
    ):
        found_with(tmp_path, {"x": images}, file)
    precise = np.full((5, 3, 4, 4), 1 / 3)  # float64 that float32 does not hold
    with pytest.raises(ConfigInvalid, match="it is float64, its input 'x' takes float32"):
        found_with(tmp_path, {"x": precise}, file)


def test_a_single_input_takes_x_or_the_only_array(tmp_path: Path) -> None:
    files = [write_image_model(tmp_path / f"{name}.onnx", name=name) for name in ("x", "pixels")]
    images = np.random.default_rng(0).standard_normal((5, 3, 4, 4)).astype(np.float32)
    for name in ("x", "images"):
        found, samples = found_with(tmp_path, {name: images, "labels": np.zeros(5)}, *files)
        assert (inputs_of(tmp_path, found, samples)["x"] == images).all()


def test_a_server_takes_samples(tmp_path: Path) -> None:
    images = np.ones((5, 3, 4, 4), np.float32)
    with inference_server() as server:
        url = f"{server.url}/v2/models/sum"
        found, samples = found_with(tmp_path, {"x": images}, url)
        assert (inputs_of(tmp_path, found, samples)["x"] == images).all()
        with pytest.raises(ConfigInvalid, match=r"it is \(5, 3, 8, 8\), its input 'x' takes float32"):
            found_with(tmp_path, {"x": np.ones((5, 3, 8, 8), np.float32)}, url)


def test_a_mask_that_is_added_may_hold_infinity(tmp_path: Path) -> None:
    """And nothing else may; NaN nowhere."""
    file = write_text_model(tmp_path / "text.onnx")
    mask = np.zeros((5, 4), np.float32)
    mask[1, 2] = -np.inf
    given = {"ids": np.ones((5, 4), np.int64), "mask": mask}
    found, samples = found_with(tmp_path, given, file)
    assert np.isinf(inputs_of(tmp_path, found, samples)["mask"]).sum() == 1
    mask[1, 2] = np.nan
    with pytest.raises(ConfigInvalid, match="holds NaN: in 1 of 5 rows, the first is row 1"):
        found_with(tmp_path, given, file)


def test_a_torch_module_takes_the_arrays_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_with_data.py").write_text(MODEL_OF_THE_USER)
    monkeypatch.chdir(tmp_path)
    arrays = {"b": np.zeros((5, 4), np.float32), "a": np.zeros((5, 2), np.int64)}
    found, _ = found_with(tmp_path, arrays, "net_with_data:two_inputs")
    [item] = found.values()
    assert isinstance(item.subject, TorchSubject)
    taken = [(tensor.source, tensor.dtype, tensor.shape) for tensor in item.subject.inputs]
    assert taken == [("b", "float32", (4,)), ("a", "int64", (2,))]
    one = measurable.parse_inputs(["4"])
    with pytest.raises(ConfigInvalid, match=r"takes 1 inputs, .* has 2 arrays"):
        found_with(tmp_path, arrays, "net_with_data:two_inputs", inputs=one)


def test_few_samples_repeat_and_many_are_cut_which_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, samples = found_with(tmp_path, transformer_samples(3), model)
    config = bench._config(found, bench.BenchOptions(batches=(1, 8)))
    [note] = bench._write_inputs(tmp_path / "inputs.npz", found, config, samples)
    assert "there are 3 rows: in larger batches, up to 8, they repeat" in note
    found, samples = found_with(tmp_path, transformer_samples(50), model)
    monkeypatch.setattr(bench, "_POOL_BYTES", 10 * 3 * 7 * 8)
    [note] = bench._write_inputs(tmp_path / "inputs.npz", found, config, samples)
    assert "The first 10 of 50 samples" in note


def test_inputs_in_another_order_get_the_same_numbers(model: Path, tmp_path: Path) -> None:
    turned = write_transformer(
        tmp_path / "turned.onnx", inputs=("position_ids", "attention_mask", "input_ids"), vocabulary=15
    )
    found = measurable.measurables([str(model), str(turned)], Hints(tmp_path, sizes={"seq": 5}))
    own = [{tensor.name: tensor.array for tensor in item.signature.inputs} for item in found.values()]
    assert own[0] == own[1]
    ids = inputs_of(tmp_path, found, None)["input_ids"]
    assert ids.max() == 14  # both have an entry for it
    assert "input_ids int64 (batch, 5): random ids from 0 to 14" in bench.inputs_in_words(found, None)[0]


def test_a_bench_of_transformers_on_real_samples(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command whole: samples, verdicts at both batch sizes, the gate, the page."""
    wrong = write_transformer(tmp_path / "wrong.onnx", scale=1.5)
    np.savez(tmp_path / "data.npz", **transformer_samples())
    where = ["--home", str(tmp_path / "runs"), "--out", str(tmp_path / "it")]
    quick = [
        "--rounds",
        "5",
        "--launches",
        "1",
        "--precision",
        "0.9",
        "--max-waited",
        "1e6",
        "--budget-s",
        "2",
    ]
    asked = ["--batch", "1,4", "--tolerance", "0.1"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(model), str(wrong), "--data", str(tmp_path / "data.npz"), *asked, *quick, *where])
    assert ended.value.code == GateFailed("").exit_code
    told = capsys.readouterr()
    assert "'logits' at batch 1, 'logits' at batch 4" in told.err
    record = read_record(tmp_path / "it")
    verdicts = {
        (one.name, one.batch): one.verdict(record.tolerance) for one in record.outputs[str(wrong)].outputs
    }
    assert verdicts["logits", 1] == verdicts["logits", 4] == "differs"
    assert verdicts["hidden", 1] == verdicts["class", 4] == "same"
    page = (tmp_path / "it" / "bench.html").read_text()
    for text in (told.out, page):
        assert "6 samples of" in text and "differs" in text and "not finite" not in text
    assert record.samples == str(tmp_path / "data.npz") and "Inputs are random" not in told.out


def test_a_file_that_is_no_npz_is_a_wrong_argument(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(b"PK no archive")
    with pytest.raises(ConfigInvalid, match=r"not an .npz file.* -> write it with numpy.savez"):
        SampleFile(tmp_path / "data.npz")


def test_labels_are_those_of_quantize() -> None:
    from hpml.pipelines.quantize.samples import _LABELS

    assert sample_file.LABELS == _LABELS
