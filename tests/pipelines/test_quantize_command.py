"""`hpml quantize`: what it writes where, what it never overwrites, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import Conditions, EngineFigures, EngineSettings, MeasurementsSpec
from hpml.core.errors import UsageError
from hpml.pipelines.__main__ import main
from hpml.pipelines.quantize import quantize_file as quantization
from hpml.pipelines.quantize.job import Bounds, Quantized
from hpml.pipelines.quantize.page import Pair, model_rows, quantize_page, verdict_in_words
from hpml.pipelines.quantize.quantize_file import QuantizeRecord
from tests.small_subjects import write_endless, write_image_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data without labels."""
    monkeypatch.chdir(tmp_path)
    write_image_model(tmp_path / "m.onnx")
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((40, 3, 4, 4), np.float32))
    return tmp_path


QUICK = ("--data", "data.npz", "--budget-s", "0.1", "--threads", "1")


def exit_code(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(["quantize", *arguments])
    return caught.value.code


def test_model_page_and_record(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a busy machine the speed is not measured, which is said; all else is there."""
    main(["quantize", "m.onnx", *QUICK, "--min-agreement", "0.5"])
    printed = capsys.readouterr().out
    record = QuantizeRecord.model_validate_json((place / "m-int8.json").read_text())
    assert (place / "m-int8.onnx").is_file() and set(record.sha256) == {"m.onnx", "m-int8.onnx"}
    assert record.speed is not None or record.speed_reason
    assert "Passed the gate" in printed and "model: m-int8.onnx" in printed
    page = (place / "m-int8.html").read_text()
    assert "<script" not in page and not re.search(r"(src|href)=", page)
    assert exit_code("m.onnx", *QUICK) == 2  # nothing is overwritten
    assert "m-int8.onnx exists already" in capsys.readouterr().err


def test_a_refused_model_is_put_aside(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((600, 3, 4, 4), np.float32))
    assert exit_code("m.onnx", *QUICK, "--min-agreement", "1", "-o", "o.onnx") == 5
    told = capsys.readouterr()
    assert "is refused" in told.err and "o.refused.onnx" in told.err and "Refused" in told.out
    assert (place / "o.refused.onnx").is_file() and not (place / "o.onnx").exists()
    assert json.loads((place / "o.json").read_text())["speed_reason"] == "the gate refused it"


def test_a_model_that_never_answers_is_ended(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_endless(place / "endless.onnx")
    np.savez("data.npz", x=np.ones((4, 4), np.float32))
    assert exit_code("endless.onnx", "--data", "data.npz", "--limit-s", "5") == 4
    told = capsys.readouterr().err
    assert (
        "the engine 'endless.onnx' failed while being quantized: it did not answer within its limit of 5 s"
        in told
    )
    assert not (place / "endless-int8.onnx").exists()


def test_faults_of_data_and_options_are_told_as_such(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("data.npz", x=np.ones((1, 3, 4, 4), np.float32))
    assert exit_code("m.onnx", *QUICK) == 3
    assert capsys.readouterr().err.startswith("error: the data has too few samples")
    assert exit_code("m.onnx", "--data", "absent.npz", "--budget-s", "nan") == 3  # before the data is read
    assert "time_budget_s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("m.onnx", "is the model itself"),
        ("o.tflite", "name of an .onnx file"),
        ("absent/o.onnx", "no folder"),
    ],
)
def test_places_that_are_refused(place: Path, out: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        quantization.places(Path("m.onnx"), Path(out), force=True)


# ----------------------------------------------------------------------------------------------- what is said


def pair(ratio: Interval | None, *, refusal: str = "", name: str = "m-int8.onnx") -> Pair:
    judgement = {
        "output": "logits",
        "is_classes": True,
        "samples": 9,
        "max_abs_error": 0.1,
        "relative_error": 0.01,
        "numbers": 90,
        "refusal": refusal,
    }
    found = Quantized.model_validate(
        {
            "inputs": (),
            "calibrated": 9,
            "activations": "uint8",
            "weight_bits": 8,
            "quantized": {"Conv": 1},
            "left": {},
            "size_bytes": 100,
            "judgement": judgement,
        }
    )
    common: dict[str, Any] = {
        "status": "measured", "target": "onnx", "precision": "", "methods": (), "size_bytes": 1,
        "parameters": 1, "macs": 1,
    }  # fmt: skip
    speed = ratio and MeasurementsSpec(
        reference="m.onnx",
        best_fp32="",
        engines={
            "m.onnx": EngineFigures(**common),
            name: EngineFigures(**common, speedup_vs_reference=ratio),
        },
        rounds=5,
        threads=1,
        seed=0,
        environment={},
        conditions=Conditions(),
    )
    return Pair(
        ("m.onnx", name), (400, 100), found, Bounds(), speed or None, "" if ratio else "INVALID, busy"
    )


@pytest.mark.parametrize(
    ("settings", "kept", "note"),
    [
        (EngineSettings(threads=2, variant="int8-activations"), "int8-activations", "the faster were kept"),
        (EngineSettings(threads=2), "uint8-activations", "the faster were kept"),
        (None, "uint8-activations", "was not measured"),
    ],
)
def test_the_bench_chooses_among_the_builds(settings: EngineSettings | None, kept: str, note: str) -> None:
    speed = pair(Interval(value=2, low=1.9, high=2.1)).speed
    assert speed is not None
    figures = speed.engines["m-int8.onnx"].model_copy(update={"settings": settings})
    measured = speed.model_copy(update={"engines": {**speed.engines, "m-int8.onnx": figures}})
    record: Any = SimpleNamespace(measurements=measured)
    names = ("uint8-activations", "int8-activations")
    name, why = quantization._chosen(record, "m-int8.onnx", names)
    assert name == kept and note in why
    assert quantization._chosen(None, "m-int8.onnx", names)[0] == "uint8-activations"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ((2.0, 1.9, 2.1), "4 times smaller, 2.00 times as fast as fp32"),
        ((0.5, 0.4, 0.6), "but slower: 0.500 times as fast"),
        ((1.0, 0.9, 1.1), "neither is clearly faster"),
        (None, "not measured: INVALID, busy. To measure it: hpml bench m.onnx m-int8.onnx"),
    ],
)
def test_the_verdict_says_what_is_known(ratio: Any, words: str) -> None:
    told = pair(Interval(value=ratio[0], low=ratio[1], high=ratio[2]) if ratio else None)
    assert words in verdict_in_words(told)
    assert verdict_in_words(told) in quantize_page(told, facts={})


def test_names_from_outside_are_escaped() -> None:
    page = quantize_page(pair(None, refusal="<script>x</script>", name="<script>alert(1)</script>"), facts={})
    assert "<script" not in page
    assert model_rows(pair(None))[0]["top-1 %"].small == ("no labels",)
