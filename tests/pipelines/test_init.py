"""`hpml init`: a recipe that fits the data, and what is left out of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from hpml.components.prepare import stage
from hpml.core.contract import Output
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main
from tests.image_tasks import image_task


def photos(root: Path, *sizes_wh: tuple[int, int], mode: str = "RGB") -> Path:
    """Three classes of noise, an image of each size four times."""
    random = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        for number, (width, height) in enumerate(sizes_wh * 4):
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{number}.png")
    return root


def init(folder: Path, data: str, model: str = "cnn", file: str = "mine.yaml") -> dict[str, Any]:
    """The recipe that init wrote."""
    main(["init", str(folder / file), "--data", data, "--model", model, "--max-accuracy-drop", "0.01"])
    return yaml.safe_load((folder / file).read_text())


@pytest.mark.parametrize(
    ("sizes_wh", "model", "side"),
    [
        ([(28, 28)], "cnn", 28),
        ([(20, 12)], "cnn", 20),
        ([(9, 8), (10, 30)], "resnet18", 30),
        ([(9, 8), (10, 30)], "vit", 32),
        ([(640, 480), (48, 64)], "cnn", 64),
        ([(2, 3)], "cnn", 4),
    ],
)
def test_the_image_size_fits_the_folder(
    sizes_wh: list[tuple[int, int]], model: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", *sizes_wh)
    written = init(tmp_path, "photos", model)
    assert written["data"] == {"source": "folder", "path": "photos", "image_size": side}
    loaded = recipe.load(tmp_path / "mine.yaml").recipe
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    result = stage.run(loaded.data, out=Output(tmp_path / "out", tmp_path / "scratch"))
    assert result.spec.task["image_shape_hwc"] == [side, side, 3]


@pytest.mark.parametrize(("data", "side"), [("digits", 8), ("x.npz", 12)])
def test_a_vit_is_told_the_size_of_its_images(
    data: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpml import models
    from hpml.artifacts.model import ArchitectureSpec

    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 10, 9), np.uint8), y=np.array([0, 1, 0, 1]))
    written = init(tmp_path, data, "vit")
    assert written["data"]["image_size"] == side
    spec = ArchitectureSpec(name="vit", arguments=written["train"]["model"]["arguments"] | {"depth": 1})
    import torch

    model = models.build(spec, image_task(classes=2))
    assert model(torch.zeros(1, 1, side, side)).shape == (1, 2)


def test_what_lies_beside_the_images_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "photos", (8, 8), mode="L")
    for name in (".DS_Store", "README", "a/Thumbs.db", "manual.pdf"):
        (root / name).write_text("text")
    init(tmp_path, str(root))
    answer = capsys.readouterr()
    assert answer.out == f"{tmp_path / 'mine.yaml'}\n"
    assert "3 classes, 12 images, grey, of 8x8 (width x height)" in answer.err
    assert "4 files: .DS_Store, README, manual.pdf, a/Thumbs.db" in answer.err


def test_a_path_is_written_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", (8, 8))
    (tmp_path / "recipes").mkdir()
    assert init(tmp_path, "photos", file="recipes/mine.yaml")["data"]["path"] == "../photos"
    loaded = recipe.load(tmp_path / "recipes/mine.yaml").recipe
    assert loaded.data.unsupported_reason() == ""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("minst5k", "did you mean 'mnist5k'?"),
        ("nowhere", "there is no such file or folder here"),
        ("pipe", "is a named pipe"),
        ("pipe.npz", "is a named pipe"),
        ("empty", "has no images"),
        ("gap", "1 folder: c (no images)"),
        ("s3://no", "does not exist"),
    ],
)
def test_data_that_cannot_be_used_leaves_no_recipe(
    data: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty/a").mkdir(parents=True)
    for file in photos(tmp_path / "gap", (4, 4)).glob("c/*"):
        file.unlink()
    for name in ("pipe", "pipe.npz"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        init(tmp_path, data)
    assert ended.value.code == 3
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()
