"""Real handwritten digits to make folders, archives and arrays from, and `prepare` as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.prepare import stage
from hpml.core.contract import Output, validate
from hpml.tasks import AnySource, task_of
from hpml.tasks.image_classification.sources.digits import Digits

Prepare = Callable[..., Artifact[DatasetSpec]]


@pytest.fixture
def prepare(run_stage: Callable[..., Artifact[Any]]) -> Prepare:
    """Run the stage on a source given as in a recipe: prepare(source="npz", path=...)."""

    def run(**config: Any) -> Artifact[DatasetSpec]:
        return run_stage(stage.run, validate(AnySource, config, where="data"))

    return run


@pytest.fixture
def out(tmp_path: Path) -> Output:
    """Where a source or a part of the stage may write."""
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    return Output(tmp_path / "out", tmp_path / "scratch", threads=2)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """100 distinct 8x8 digits, uint8 (100, 8, 8), ten of each class in turn, and their labels."""
    place = tmp_path_factory.mktemp("digits")
    loaded = Digits().load(Output(place, place)).splits["train"]
    rows = np.concatenate([np.flatnonzero(loaded.labels == label)[:10] for label in range(10)])
    rows = rows.reshape(10, 10).T.ravel()
    return loaded.images_nhwc[rows, :, :, 0], loaded.labels[rows]


@pytest.fixture
def image_folder(digits: tuple[NDArray[np.uint8], NDArray[np.int64]], tmp_path: Path) -> Path:
    """The digits 0, 1 and 2 as PNG files, ten in each of the folders zero, one and two."""
    root = tmp_path / "photos"
    for image, label in zip(*digits, strict=True):
        if label < 3:
            folder = root / ("zero", "one", "two")[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{len(list(folder.iterdir())):02}.png")
    return root


@pytest.fixture
def splits_of() -> Callable[[Artifact[DatasetSpec]], dict[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Images and labels of all splits of an artifact."""

    def read(data: Artifact[DatasetSpec]) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        task = task_of(data.spec.task)
        stored = {name: task.stored(data, name) for name in data.spec.splits}
        return {name: (arrays["images"], arrays["labels"]) for name, arrays in stored.items()}

    return read


@pytest.fixture
def training_of(
    splits_of: Callable[[Artifact[DatasetSpec]], dict[str, tuple[NDArray[Any], NDArray[Any]]]],
) -> Callable[[Artifact[DatasetSpec]], tuple[NDArray[Any], NDArray[Any]]]:
    """Images and labels that were given for training: the train split and the validation split, in one."""

    def read(data: Artifact[DatasetSpec]) -> tuple[NDArray[Any], NDArray[Any]]:
        splits = splits_of(data)
        images, labels = zip(splits["train"], splits["validation"], strict=True)
        return np.concatenate(images), np.concatenate(labels)

    return read
