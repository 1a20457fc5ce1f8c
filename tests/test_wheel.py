"""The built wheel in an empty environment that has what hpml-pipeline[stages,data] asks for, and no more."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.chain import QUICK

ROOT = Path(__file__).parents[1]
RECIPE = """\
data: digits
train: {model: cnn}
goals: {max_accuracy_drop: 0.01}
"""
SMALL = ["--set", "train.epochs=1", "--set", "train.model.arguments={width: 8}"]

LINKS = ("components", "pipelines", "serving")  # in hpml, to folders beside it

pytestmark = pytest.mark.slow


def sources() -> set[str]:
    """What git keeps of the package: its files and links."""
    listed = subprocess.run(
        ["git", "ls-files", "hpml", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of what is in the clone, which stays as it is."""
    copy = tmp_path_factory.mktemp("source")
    for name in (*sources(), "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(copy / "dist"), str(copy)], check=True)
    [file] = (copy / "dist").iterdir()
    return file


def asked_for(requirement: str) -> Iterator[importlib.metadata.Distribution]:
    """The distributions of this environment that `requirement` asks for, itself left out, and theirs."""
    pending, seen = [Requirement(requirement)], set()
    while pending:
        wanted = pending.pop()
        extras = {"", *wanted.extras}
        if (wanted.name, *sorted(extras)) in seen:
            continue
        seen.add((wanted.name, *sorted(extras)))
        found = importlib.metadata.distribution(wanted.name)
        if wanted.name != "hpml-pipeline":
            yield found
        for line in found.requires or ():
            needed = Requirement(line)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(needed)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; what it needs is linked from this one rather than fetched."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    [packages] = place.glob("lib/python*/site-packages")
    for distribution in asked_for("hpml-pipeline[stages,data]"):
        for name in {file.parts[0] for file in distribution.files or ()}:
            origin, link = Path(str(distribution.locate_file(name))), packages / name
            if name not in ("..", "__pycache__") and origin.suffix != ".pth" and not link.exists():
                link.symlink_to(origin)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    return place


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HPML_HOME")}
    program = str(environment / "bin" / command[0])
    return subprocess.run(
        [program, *command[1:]], cwd=folder, env=clean, capture_output=True, text=True, timeout=500
    )


def test_it_holds_every_file_of_both_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {
        f"hpml/{name}" if name.split("/")[0] in LINKS else name
        for name in sources() - {f"hpml/{link}" for link in LINKS}
    }


def test_three_lines_in_an_empty_folder_run_to_their_end(environment: Path, tmp_path: Path) -> None:
    places = "import hpml.components, hpml.pipelines as p; print(hpml.components.__file__, p.__file__)"
    imported = run(environment, tmp_path, "python", "-c", places).stdout.split()
    assert len(imported) == 2 and all(Path(file).is_relative_to(environment) for file in imported)
    for absent in ("pytest", "kfp", "components", "pipelines"):  # it has what it asks for, and no more
        assert run(environment, tmp_path, "python", "-c", f"import {absent}").returncode == 1
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = run(environment, tmp_path, "hpml", "run", "recipe.yaml", *SMALL, *QUICK)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/latest/report/report.html").is_file()
    checked = run(environment, tmp_path, "python", "-I", str(tmp_path / "runs/latest/bundle/bundle.py"))
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["golden_pictures"] == 9
