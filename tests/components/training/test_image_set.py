"""Where the images of a split are while a network trains, and that it makes no difference."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model_input import InputSpec
from hpml.tasks.images import load_split
from hpml.training import image_set
from hpml.training.image_set import ImageSet, ahead

Data = Artifact[DatasetSpec]
CPU = torch.device("cpu")


@pytest.fixture
def images(digits_data: Data) -> ImageSet:
    inputs = InputSpec(shape_chw=(1, 8, 8), mean=digits_data.spec.mean, std=digits_data.spec.std)
    return ImageSet(digits_data, "train", inputs, CPU)


def test_kept_streamed_and_read_ahead_are_the_same_images(images: ImageSet, digits_data: Data) -> None:
    parts = [torch.tensor([5, 3, 3]), slice(10, 14), torch.tensor([1400])]
    whole = torch.from_numpy(np.array(load_split(digits_data, "train")[0]))
    expected = [whole[part].permute(0, 3, 1, 2) for part in parts]

    def check(found: list[torch.Tensor]) -> None:
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()

    check(list(images.stream(parts)))
    check([part.permute(0, 3, 1, 2) for part in ahead(images._read, parts)])
    images._resident_nhwc = whole
    check(list(images.stream(parts)))


def test_a_split_is_not_copied_into_memory(digits_data: Data, tmp_path: Path, images: ImageSet) -> None:
    """A large one is in its file: what is read are the rows of a batch."""
    for name in ("train_images.npy", "train_labels.npy"):
        rows = np.load(digits_data.file(name))
        np.save(tmp_path / name, np.repeat(rows, 50, axis=0))
    large = Artifact(tmp_path, digits_data.manifest, digits_data.spec)
    inputs = InputSpec(shape_chw=(1, 8, 8), mean=(0.5,), std=(0.5,))
    tracemalloc.start()
    [batch] = ImageSet(large, "train", inputs, CPU).stream([torch.arange(64)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.shape == (64, 1, 8, 8)
    assert peak_bytes < 0.5 * (tmp_path / "train_images.npy").stat().st_size


def test_what_is_ahead_is_a_few_parts_and_ends_with_who_asks() -> None:
    taken: list[int] = []
    parts = (torch.tensor([number]) for number in range(100))
    with closing(ahead(lambda rows: taken.append(int(rows)) or int(rows), parts)) as made:  # type: ignore[func-returns-value, arg-type]
        assert [next(made), next(made)] == [0, 1]
    assert len(taken) <= 2 + image_set._AHEAD
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]


def test_an_error_of_a_file_reaches_the_training() -> None:
    def broken(_: object) -> int:
        raise OSError("input/output error")

    with pytest.raises(OSError, match="input/output"):
        next(ahead(broken, [slice(0, 1)]))


@pytest.mark.parametrize(
    ("size_gb", "said"), [(24.0, "is kept on the GPU"), (26.0, "is sent to the GPU batch by batch")]
)
def test_a_log_line_says_where_a_split_is_and_what_the_limit_is(size_gb: float, said: str) -> None:
    line = image_set._in_words("train", int(size_gb * 1e9), 100 * 10**9)
    assert said in line and f"{size_gb:.3f} GB" in line and "25% of its free 100.0 GB is the limit" in line
