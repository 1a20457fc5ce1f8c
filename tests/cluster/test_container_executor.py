"""`hpml run --executor container` with podman and the image that the cluster gets, too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.access import CPU_IMAGE, ROOT, wait_until

HPML = Path(sys.executable).with_name("hpml")
RECIPE = ROOT / "tests" / "chain_recipe.yaml"
DETERMINISTIC = {"prepare", "train", "compress"}


def hpml(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HPML_HOME": str(home), "COLUMNS": "80"}
    return subprocess.run(
        [str(HPML), *arguments], env=environment, capture_output=True, text=True, check=False
    )


def result(home: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(hpml(home, "report", "-o", "json").stdout)
    return answer


def containers() -> list[str]:
    answer = subprocess.run(
        ["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, check=True
    )
    return [name for name in answer.stdout.split() if name.startswith("hpml-")]


def checkpoints(home: Path) -> list[str]:
    """Their names, which begin with the step."""
    return [file.name for file in (home / ".store" / "scratch").glob("*/checkpoints-*/*.safetensors")]


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if not shutil.which("podman"):
        pytest.skip("podman is not installed")
    found = subprocess.run(["podman", "image", "exists", CPU_IMAGE], check=False)
    assert found.returncode == 0, f"no image {CPU_IMAGE}: tests/cluster/images builds it"


def test_the_chain_ends_as_it_does_in_processes(tmp_path: Path) -> None:
    boxed, bare = tmp_path / "boxed", tmp_path / "bare"
    run = hpml(
        boxed, "run", str(RECIPE), "--executor", "container", "--set", f"cluster.images.cpu={CPU_IMAGE}"
    )
    assert run.returncode == 0, run.stderr
    plain = hpml(bare, "run", str(RECIPE))
    assert plain.returncode == 0, plain.stderr
    contained, processes = result(boxed), result(bare)
    for name, step in contained["steps"].items():
        if step["stage"] in DETERMINISTIC:
            assert step["digest"] == processes["steps"][name]["digest"], name
    assert contained["chosen"] and Path(contained["report"]).is_file()
    assert (Path(contained["bundle"]) / "README.md").is_file()
    again = hpml(
        boxed, "run", str(RECIPE), "--executor", "container", "--set", f"cluster.images.cpu={CPU_IMAGE}"
    )
    assert again.returncode == 0, again.stderr
    assert {step["status"] for step in result(boxed)["steps"].values()} == {"cached"}
    assert containers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_containers_end_with_the_executor(tmp_path: Path, number: signal.Signals) -> None:
    command = [str(HPML), "run", str(RECIPE), "--home", str(tmp_path), "--executor", "container"]
    command += ["--set", f"cluster.images.cpu={CPU_IMAGE}", "--set", "train.epochs=5000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: checkpoints(tmp_path), "a training with a checkpoint")
    before = checkpoints(tmp_path)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL), said
    wait_until(lambda: not containers(), "no container is left", seconds=40)
    assert checkpoints(tmp_path)
    if number == signal.SIGTERM:
        assert max(checkpoints(tmp_path)) > max(before), "the training saved what it had"
