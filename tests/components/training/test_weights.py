"""Trained weights that a user brings, as they come: right, of another network, hostile."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.report.content import _history
from hpml.components.train import stage
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Output, validate
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.pipelines import recipe
from hpml.training.weights import load_into
from tests.components.conftest import Bucket

Data = Artifact[DatasetSpec]
Model = Artifact[ModelSpec]
RunStage = Callable[..., Artifact[Any]]
FIRST = "features.0.weight"
CNN = {"architecture": "cnn", "arguments": {"width": 16}}


@pytest.fixture
def out(tmp_path: Path) -> Output:
    (tmp_path / "scratch").mkdir()
    return Output(tmp_path, tmp_path / "scratch")


def test_weights_are_taken_as_they_are(run_stage: RunStage, digits_data: Data, small_model: Model) -> None:
    config = TrainConfig(model=CNN, weights=small_model.file(models.WEIGHTS), epochs=0)
    taken = run_stage(stage.run, config, data=digits_data)
    before, after = (load_file(model.file(models.WEIGHTS)) for model in (small_model, taken))
    assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())
    assert taken.spec.quality["accuracy_top1"] == pytest.approx(
        small_model.spec.quality["accuracy_top1"], abs=0.003
    )
    assert set(taken.manifest.metrics) == {"validation_accuracy_top1", "parameters", "macs"}
    assert _history(taken) == ()


def test_weights_are_trained_further(run_stage: RunStage, digits_data: Data, small_model: Model) -> None:
    """One epoch from the trained ones is better than one from random ones, and they are checked as ever."""
    config = TrainConfig(model=CNN, epochs=1, learning_rate=1e-3, augment={"shift": 0})
    random = run_stage(stage.run, config, data=digits_data)
    weights = small_model.file(models.WEIGHTS)
    tuned = run_stage(stage.run, config.model_copy(update={"weights": weights}), data=digits_data)
    assert tuned.spec.quality["accuracy_top1"] > 0.95 > random.spec.quality["accuracy_top1"]
    assert len(_history(tuned)) == 1


def test_weights_in_s3(bucket: Bucket, small_model: Model, out: Output) -> None:
    content = small_model.file(models.WEIGHTS).read_bytes()
    bucket.put("weights/cnn.safetensors", content)
    given = f"{bucket.uri}/weights/cnn.safetensors"
    config = TrainConfig(model=CNN, weights=given, epochs=0)
    assert config.unsupported_reason() == ""
    known = config.fingerprint()
    model = models.rebuild(small_model.spec)
    load_into(model, given, out)
    assert torch.equal(model.state_dict()[FIRST], load_file(small_model.file(models.WEIGHTS))[FIRST])
    assert not list(out.scratch.iterdir())
    bucket.put("weights/cnn.safetensors", content + b" ")
    assert config.fingerprint() != known
    with pytest.raises(ConfigInvalid, match="no object at"):
        load_into(model, f"{bucket.uri}/weights", out)


def test_what_is_in_the_file_is_part_of_the_key(tmp_path: Path) -> None:
    """Not its name or its time: a copy is the same, and what was rewritten in place is another."""
    one, two = tmp_path / "one", tmp_path / "two"
    for file in (one, two):
        file.write_bytes(b"abc")
        os.utime(file, (1, 1))
    digest = TrainConfig(weights=one).fingerprint()
    assert digest == TrainConfig(weights=two).fingerprint() != ""
    one.write_bytes(b"abd")
    os.utime(one, (1, 1))
    assert TrainConfig(weights=one).fingerprint() != digest
    assert TrainConfig().fingerprint() == ""


def test_a_recipe_names_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("data: digits\ntrain: {weights: mine.safetensors, epochs: 0}\n")
    assert recipe.load(tmp_path / "recipe.yaml").recipe.train.weights == tmp_path / "mine.safetensors"
    with pytest.raises(ConfigInvalid, match="epochs 0 trains nothing: set epochs, or `weights`"):
        validate(TrainConfig, {"epochs": 0}, where="train")


# ------------------------------------------------------------------------------------ of another network


def changed(small_model: Model, place: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """A copy of the weights, with some replaced; None: left out."""
    weights = load_file(small_model.file(models.WEIGHTS)) | tensors
    file = place / "changed.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file)
    return file


def test_what_does_not_fit_is_listed_by_name_and_shape(small_model: Model, out: Output) -> None:
    names = list(load_file(small_model.file(models.WEIGHTS)))
    others = {FIRST: torch.zeros(8, 1, 3, 3), "module." + "x" * 200: torch.zeros(1)}
    file = changed(small_model, out.path, dict.fromkeys(names[2:]) | others)
    model = models.rebuild(small_model.spec)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigInvalid) as caught:
        load_into(model, file, out)
    told = str(caught.value)
    assert "missing: " in told and f"and {len(names) - 3 - 4} more" in told
    assert "1 unexpected: module.xxx" in told and "x" * 100 not in told
    assert "1 of another shape: features.0.weight [8, 1, 3, 3] instead of [16, 1, 3, 3]" in told
    assert "set train.model" in told
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_precision_is_converted_and_integers_are_not(small_model: Model, out: Output) -> None:
    weight = load_file(small_model.file(models.WEIGHTS))[FIRST]
    model = models.rebuild(small_model.spec)
    load_into(model, changed(small_model, out.path, {FIRST: weight.bfloat16()}), out)
    assert torch.equal(model.state_dict()[FIRST], weight.bfloat16().float())
    with pytest.raises(ConfigInvalid, match=r"or the reverse: features\.0\.weight"):
        load_into(model, changed(small_model, out.path, {FIRST: weight.to(torch.int8)}), out)


def test_weights_that_are_not_finite_are_named(small_model: Model, out: Output) -> None:
    file = changed(small_model, out.path, {FIRST: torch.full((16, 1, 3, 3), torch.nan)})
    with pytest.raises(ConfigInvalid, match=r"not finite: features\.0\.weight"):
        load_into(models.rebuild(small_model.spec), file, out)


# --------------------------------------------------------------------------------------------- hostile files


class _Executes:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_before_anything_runs(
    out: Output, small_model: Model, capsys: pytest.CaptureFixture[str], zipped: bool
) -> None:
    file = out.path / "model.safetensors"
    torch.save({"w": _Executes()}, file, _use_new_zipfile_serialization=zipped)
    unsupported_reason = TrainConfig(weights=file).unsupported_reason()
    assert "is a pickle of torch" in unsupported_reason and "weights_only=True" in unsupported_reason
    with pytest.raises(HpmlError, match="is a pickle of torch"):
        load_into(models.rebuild(small_model.spec), file, out)
    assert "executed" not in capsys.readouterr().out


def header(fields: Any, data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


HOSTILE = {
    "empty": b"",
    "a header that is longer than the file": struct.pack("<Q", 2**62) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "offsets beyond its end": header(
        {"0.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    ),
    "offsets that overlap": header(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("a", "b")}, b"\0" * 4
    ),
    "text": b"no weights at all, and quite long enough",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_or_hostile_file_is_one_line(small_model: Model, out: Output, content: bytes) -> None:
    file = out.path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigInvalid, match="not a whole file of safetensors"):
        load_into(models.rebuild(small_model.spec), file, out)


def test_a_folder_a_pipe_and_nothing_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a named pipe"),
        (tmp_path / "nothing", "does not exist"),
        (Path("/dev/zero"), "is a device"),
    ):
        config = TrainConfig(weights=path)
        assert f"{path} {said}" in config.unsupported_reason()
        assert config.fingerprint() == ""
