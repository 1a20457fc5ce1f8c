"""docs/bring-your-own.md, followed to the letter: a user's images and model through the whole chain."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpml.data_files import chitchat
from tests.chain import HPML, QUICK
from tests.tasks.language_modeling.model_folders import write_folder

ROOT = Path(__file__).resolve().parents[1]


def passage(name: str) -> str:
    """The code block of the page that follows the mark `<!-- name -->`."""
    page = (ROOT / "docs" / "bring-your-own.md").read_text()
    match = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    assert match, name
    return match[1]


def draw(kind: str, random: np.random.Generator) -> np.ndarray:
    """A 40x36 RGB picture of bars that lie, stand, or cross, on noise."""
    image = random.integers(0, 80, (40, 36, 3), dtype=np.uint8)
    if kind in ("lying", "crossed"):
        row = int(random.integers(5, 30))
        image[row : row + 5] = random.integers(150, 255, 3)
    if kind in ("standing", "crossed"):
        column = int(random.integers(5, 26))
        image[:, column : column + 5] = random.integers(150, 255, 3)
    return image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from PIL import Image

    random = np.random.default_rng(0)
    for kind in ("lying", "standing", "crossed"):
        place = tmp_path / "photos" / kind
        place.mkdir(parents=True)
        for index in range(100):
            Image.fromarray(draw(kind, random)).save(place / f"{index:03}.png")
    (tmp_path / "recipe.yaml").write_text(passage("recipe"))
    (tmp_path / "mynets.py").write_text(passage("model"))
    return tmp_path


def hpml(folder: Path, *arguments: str, recipe: str = "recipe.yaml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HPML), "run", recipe, "-o", "json", "--no-tracking", *QUICK, *arguments],
        cwd=folder,
        env={**os.environ, "HPML_HOME": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow  # a second chain
def test_a_users_own_model_and_images_run_through_the_whole_chain(folder: Path) -> None:
    assert len(passage("recipe").splitlines()) < 10
    first = hpml(folder)
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["chosen"].endswith("/onnx")
    assert answer["measurements"]["engines"][answer["chosen"]]["quality"]["accuracy_top1"]["value"] > 0.6

    photos = sorted(str(file) for file in folder.glob("photos/*/*.png"))
    served = [sys.executable, "-I", "bundle.py", "--json", *photos]
    told = json.loads(subprocess.run(served, cwd=answer["bundle"], capture_output=True, check=True).stdout)
    right = [item["class"] == Path(item["file"]).parent.name for item in told]
    assert len(right) == len(photos) and sum(right) > 0.6 * len(right)

    module = folder / "mynets.py"
    module.write_text(module.read_text() + "\nCHANGED = True\n")
    changed = json.loads(hpml(folder, "--only", "train").stdout)
    assert changed["steps"]["prepare"]["status"] == "cached"
    assert changed["steps"]["train"]["status"] == "done"
    assert any("your code: mynets" in reason for reason in changed["steps"]["train"]["reasons"])

    trained = Path(changed["steps"]["train"]["digest"])
    [weights] = (folder / "runs").glob(f".store/**/{trained}/model.safetensors")
    shutil.copy(weights, folder / "small_net.safetensors")
    given = ["--set", "train.weights=small_net.safetensors", "--set", "train.epochs=0", "--only", "train"]
    taken = json.loads(hpml(folder, *given).stdout)["steps"]["train"]
    assert taken["status"] == "done" and any("weights changed" in reason for reason in taken["reasons"])

    (folder / "photos" / "lying" / "000.png").unlink()
    assert json.loads(hpml(folder, "--only", "prepare").stdout)["steps"]["prepare"]["status"] == "done"


@pytest.mark.slow  # a chain; tests/tasks/language_modeling/test_transformers_stages.py has its stages
def test_a_model_of_transformers_runs_through_the_whole_chain_and_talks(tmp_path: Path) -> None:
    write_folder(tmp_path / "smollm", max_position_embeddings=64)
    lines = ["\n".join(turns) for turns in itertools.islice(chitchat.conversations(), 200)]
    (tmp_path / "notes.txt").write_text("\n\n".join(lines))
    (tmp_path / "smollm.yaml").write_text(passage("transformers"))
    loose = ["targets=[{target: onnx, tolerance: {min_agreement: 0.5}}]", "goals.max_quality_loss=0.5"]
    loose += [
        "benchmark.launches=1",
        "peaks={gemm_sizes: [64, 256], rounds: 5, time_budget_s: 3, max_spread: 10}",
    ]
    given = [part for item in loose for part in ("--set", item)]  # random weights decide next to nothing
    ran = hpml(tmp_path, *given, recipe="smollm.yaml")
    assert ran.returncode == 0, ran.stderr
    bundle = Path(json.loads(ran.stdout)["bundle"])
    assert "| trained from | smollm, licence not stated |" in (bundle / "README.md").read_text()

    (tmp_path / "smollm").rename(tmp_path / "elsewhere")  # nothing after train needs it
    talk = [str(HPML), "chat", "--max-tokens", "3"]
    for partner in (str(bundle), "latest", "latest:fp32/eager"):
        told = subprocess.run(
            [*talk, partner],
            input="hello\nhow are you?\n",
            env={**os.environ, "HPML_HOME": str(tmp_path / "runs")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(told.stdout.splitlines()) == 2
