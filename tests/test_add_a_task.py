"""docs/add-a-task.md, followed to the letter: a user's own task beside a recipe, and one more of ours."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpml.artifacts.folder import open_artifact
from hpml.tasks import task_class
from tests.chain import QUICK

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add-a-task.md").read_text()
FILES = ("tabular.yaml", "diabetes.py", "diabetes_processing.py")


def passage(name: str) -> str:
    """The code block of the page that follows the mark `<!-- name -->`."""
    match = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert match, name
    return match[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_text(passage(name))
    return tmp_path


def hpml(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hpml.pipelines", "run", "tabular.yaml", "--no-tracking", *arguments],
        cwd=folder,
        env={**os.environ, "HPML_HOME": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=500,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_shows_what_is_in_recipes() -> None:
    for name in FILES:
        assert passage(name) == (ROOT / "recipes" / name).read_text()


def test_a_users_own_task_trains_and_an_edit_of_it_reruns_what_uses_it(folder: Path) -> None:
    """The quick twin of the whole chain."""
    few = ("-o", "json", "--only", "train")
    steps = answer(hpml(folder, *few))["steps"]
    [model] = (folder / "runs").glob(f".store/**/{steps['train']['digest']}")
    spec = open_artifact(model, kind="model").spec
    assert spec.task["task"] == "diabetes:Progression"
    assert [one.name for one in spec.operations[0].inputs] == ["measurements", "sex"]
    assert spec.quality["rmse"] < 65 and spec.quality["r2"] > 0.35  # ridge regression: 60; the mean: 80, 0

    module = folder / "diabetes.py"
    module.write_text(
        module.read_text().replace("class Progression(CustomTask)", "class Progress(CustomTask)")
    )
    refused = hpml(folder, *few, "--dry-run")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "cannot import the task 'diabetes:Progression'" in refused.stderr
    prepare, train = json.loads(refused.stdout)
    assert prepare["outcome"] == "would run" and train["outcome"] == "would fail"
    assert any("your code: diabetes" in why for why in prepare["reasons"])


def test_the_processing_of_its_bundle_makes_the_inputs_of_the_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPML_IMPORT_PATHS", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    for module in ("diabetes", "diabetes_processing"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    facts = {"measurements_mean": (0.0,) * 9, "measurements_std": (1.0,) * 9}
    task = task_class("diabetes:Progression").model_validate(
        {"task": "diabetes:Progression", **facts, "progression_mean": 150.0, "progression_std": 80.0}
    )
    packaging = task.packaging()
    assert packaging.processing is not None
    shipped = runpy.run_path(str(packaging.processing))
    arrays = shipped["preprocess"](json.loads(passage("patients.json")), packaging.facts)
    for one in task.operations(torch.nn.Identity())[0].inputs:
        assert (arrays[one.name].dtype, arrays[one.name].shape) == (one.dtype, (1, *one.shape[1:]))
    answer = shipped["postprocess"]({"progression": np.array([151.04], "float32")}, packaging.facts)
    assert json.dumps(answer) == '[{"progression": 151.0}]'


@pytest.mark.slow  # a chain; the test above is the quick twin
def test_a_users_own_task_runs_through_the_whole_chain(folder: Path) -> None:
    done = answer(hpml(folder, "-o", "json", *QUICK))
    engines = done["measurements"]["engines"]
    for name in ("fp32/onnx", "int8/onnx"):
        assert engines[name]["status"] == "measured", engines[name]
        assert engines[name]["quality"]["rmse"]["value"] < 65
    assert done["chosen"].endswith("/onnx")
    bundle = Path(done["bundle"])
    (folder / "patients.json").write_text(passage("patients.json"))
    for arguments in ((), (str(folder / "patients.json"),)):
        asked = subprocess.run(
            [sys.executable, "-P", "bundle.py", *arguments], cwd=bundle, capture_output=True, text=True
        )
        assert asked.returncode == 0, asked.stderr
    [patient] = json.loads(asked.stdout)
    assert 25 < patient["progression"] < 346


def test_a_task_of_ours_is_a_folder_a_row_and_a_test(tmp_path: Path) -> None:
    for package in ("components", "pipelines", "serving", "hpml"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=ignored)
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "chain.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    names = re.findall(r"<!-- ((?:hpml|tests)/\S+) -->", PAGE)
    test = "tests/components/prepare/test_wine.py"
    outside = [name for name in names if not name.startswith("hpml/tasks/wine/")]
    assert outside == [test]
    for name in names:
        assert not (ROOT / name).exists()
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(passage(name))
    table = tmp_path / "hpml" / "tasks" / "__init__.py"
    text = table.read_text()
    [(row, opening)] = re.findall(r"`(\"\w+\": \w+,)` in `(\w+)`", PAGE)
    start = re.search(rf"^{opening}: .* = \{{", text, re.MULTILINE)
    assert start, opening
    before = f"{text[: start.start()]}{passage('import')}"
    table.write_text(f"{before}{start[0]}{row} {text[start.end() :]}")

    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
