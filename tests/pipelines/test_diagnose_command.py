"""`hpml diagnose` on a run whose step has left a diagnosis in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, Finding, LayerFigures
from hpml.artifacts.folder import Lineage, seal_artifact
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store

HPML = Path(sys.executable).with_name("hpml")

LAYER = LayerFigures(
    name="a.very.long.name.of.a.module.inside.a.module.conv1",
    op="QLinearConv",
    precision="int8",
    flops=1_000_000,
    bytes=40_000,
    time_us=123.4,
    bound="compute",
    share_of_roof=0.42,
)
DIAGNOSIS = DiagnosisSpec(
    threads=2,
    engines={
        "int8/onnx": EngineDiagnosis(
            status="diagnosed",
            flops=50_000_000,
            bytes=2_000_000,
            time_us=710.0,
            profiled_us=500.0,
            roof_us=270.0,
            share_of_roof=0.38,
            bound="overhead",
            layers=(LAYER, LAYER.model_copy(update={"name": "head", "bound": None, "share_of_roof": None})),
            verdict="dispatch-bound: 0.27 ms of arithmetic in 0.71 ms. The stem has 3 input channels.",
            findings=(
                Finding(
                    rule="stem",
                    sentence="the stem conv1 has 3 input channels: it reaches 4 % of its peak and takes "
                    "15 % of the time",
                    remedy="give the stem fewer output channels or a larger stride; it cannot fill a vector",
                ),
            ),
        ),
        "int8/tensorrt": EngineDiagnosis(
            status="not diagnosed", reason="not built: this machine has no NVIDIA GPU"
        ),
    },
)


def remember(home: Path, step: StepRecord) -> RunRecord:
    record = RunRecord(
        id="digits-1",
        recipe="digits",
        recipe_file="digits.yaml",
        status="done",
        started_at_s=time.time(),
        steps={step.stage: step},
    )
    (home / record.id).mkdir(parents=True)
    run_record.save(home, record)
    return record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A workspace with one run and its diagnosis."""
    home = tmp_path / "home"
    folder = Path(Store(home).incoming("diagnose"))
    folder.mkdir()
    lineage = Lineage(
        stage="diagnose",
        code_digest="",
        config=None,
        parents={},
        libraries={},
        started_at_s=0.0,
        seconds=0.0,
        peak_rss_bytes=0,
    )
    manifest = seal_artifact(folder, spec=DIAGNOSIS, metrics={}, lineage=lineage)
    folder.rename(Store(home).object_path(manifest.digest))
    remember(home, StepRecord(stage="diagnose", status="done", digest=manifest.digest))
    return home


def diagnose(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HPML), "diagnose", *arguments, "--home", str(home)],
        env={**os.environ, "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_one_engine(home: Path) -> None:
    answer = diagnose(home, "digits-1", "int8/onnx")
    assert answer.returncode == 0, answer.stderr
    text = " ".join(answer.stdout.split())
    assert "dispatch-bound: 0.27 ms of arithmetic in 0.71 ms." in text
    assert "38 % of the peak with 2 threads at batch 1: 50.0 million operations and 2.00 MB" in text
    assert "* the stem conv1 has 3 input channels" in text
    assert "-> give the stem fewer output channels" in text
    assert "QLinearConv 123 25 compute 42" in text
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert answer.stderr == ""


def test_all_engines_with_what_to_do(home: Path) -> None:
    answer = diagnose(home, "digits-1")
    assert answer.stdout.splitlines() == [
        "int8/onnx: dispatch-bound: 0.27 ms of arithmetic in 0.71 ms",
        "  -> give the stem fewer output channels or a larger stride; it cannot fill a",
        "     vector",
        "int8/tensorrt: not diagnosed, not built: this machine has no NVIDIA GPU",
    ]


def test_what_was_not_diagnosed_says_why(home: Path) -> None:
    answer = diagnose(home, "digits-1", "int8/tensorrt")
    assert answer.returncode == 0
    assert answer.stdout.startswith("int8/tensorrt was not diagnosed: not built: this machine has no NVIDIA")


@pytest.mark.parametrize("variant", ["", "int8/onnx"])
def test_json_is_the_spec(home: Path, variant: str) -> None:
    answer = diagnose(home, "digits-1", *([variant] if variant else []), "-o", "json")
    found: Any = json.loads(answer.stdout)
    expected = DIAGNOSIS.engines[variant] if variant else DIAGNOSIS
    assert type(expected).model_validate(found) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("digits-1", "int8/onx"), "the run has no engine 'int8/onx': did you mean int8/onnx"),
        (("digits-1", "zzz"), "it has int8/onnx, int8/tensorrt"),
        (("digits-2",), "there is no run 'digits-2'"),
    ],
)
def test_what_is_wrong_is_one_line(home: Path, arguments: tuple[str, ...], said: str) -> None:
    answer = diagnose(home, *arguments)
    assert answer.returncode == 2
    assert said in answer.stderr and len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (StepRecord(stage="benchmark", status="done"), "it has no step diagnose"),
        (StepRecord(stage="diagnose", status="blocked"), "its step diagnose is blocked"),
        (StepRecord(stage="diagnose", status="failed", error="no peaks"), "is failed: no peaks"),
    ],
)
def test_a_run_without_a_diagnosis(tmp_path: Path, step: StepRecord, why: str) -> None:
    remember(tmp_path, step)
    answer = diagnose(tmp_path, "digits-1")
    assert answer.returncode == 2
    assert why in answer.stderr and "-> " in answer.stderr
