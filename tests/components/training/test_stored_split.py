"""Where the rows of a split are while a network trains, and that it makes no difference."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.tasks import task_of
from hpml.training import stored_split
from hpml.training.stored_split import StoredSplit, ahead

Data = Artifact[DatasetSpec]
CPU = torch.device("cpu")


@pytest.fixture
def digits(digits_data: Data) -> StoredSplit:
    return StoredSplit(task_of(digits_data.spec.task).stored(digits_data, "train"), "train", CPU)


def test_kept_streamed_and_read_ahead_are_the_same_rows(digits: StoredSplit, digits_data: Data) -> None:
    parts = [torch.tensor([5, 3, 3]), slice(10, 14), torch.tensor([1200])]
    names = ("images", "labels")
    whole = {name: torch.from_numpy(np.load(digits_data.file(f"train_{name}.npy"))) for name in names}

    def check(found: Iterable[Mapping[str, torch.Tensor]]) -> None:
        for part, batch in zip(parts, found, strict=True):
            assert set(batch) == set(names)
            for name, tensor in batch.items():
                expected = whole[name][part]
                assert torch.equal(tensor, expected) and tensor.stride() == expected.stride()

    check(digits.stream(parts))
    check(ahead(digits._read, parts))
    digits._resident = whole
    check(digits.stream(parts))


def test_a_split_is_not_copied_into_memory(digits_data: Data, tmp_path: Path) -> None:
    """A large one is in its file: what is read are the rows of a batch."""
    for name in ("train_images.npy", "train_labels.npy"):
        rows = np.load(digits_data.file(name))
        np.save(tmp_path / name, np.repeat(rows, 50, axis=0))
    large = Artifact(tmp_path, digits_data.manifest, digits_data.spec)
    tracemalloc.start()
    split = StoredSplit(task_of(large.spec.task).stored(large, "train"), "train", CPU)
    [batch] = split.stream([torch.arange(64)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch["images"].shape == (64, 8, 8, 1)
    assert peak_bytes < 0.5 * (tmp_path / "train_images.npy").stat().st_size


def test_what_is_ahead_is_a_few_parts_and_ends_with_who_asks() -> None:
    taken: list[int] = []
    parts = (torch.tensor([number]) for number in range(100))
    with closing(ahead(lambda rows: taken.append(int(rows)) or int(rows), parts)) as made:  # type: ignore[func-returns-value, arg-type]
        assert [next(made), next(made)] == [0, 1]
    assert len(taken) <= 2 + stored_split._AHEAD
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rows")]


def test_an_error_of_a_file_reaches_the_training() -> None:
    def broken(_: object) -> int:
        raise OSError("input/output error")

    with pytest.raises(OSError, match="input/output"):
        next(ahead(broken, [slice(0, 1)]))


@pytest.mark.parametrize(
    ("size_gb", "said"), [(24.0, "is kept on the GPU"), (26.0, "is sent to the GPU batch by batch")]
)
def test_a_log_line_says_where_a_split_is_and_what_the_limit_is(size_gb: float, said: str) -> None:
    line = stored_split._in_words("train", int(size_gb * 1e9), 100 * 10**9)
    assert said in line and f"{size_gb:.3f} GB" in line and "25% of its free 100.0 GB is the limit" in line
