"""idx: MNIST's format, gzipped or not, and what may be wrong with its files."""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.core.errors import StageFailed
from hpml.tasks import task_of
from hpml.tasks.image_classification.sources.idx import Idx


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def published(digits: Any, tmp_path: Path) -> Path:
    """The digits as MNIST is published: 70 to train with, 30 to test with."""
    root = tmp_path / "mnist"
    root.mkdir()
    for split, rows in (("train", slice(70)), ("t10k", slice(70, None))):
        for name, array in zip(("images-idx3", "labels-idx1"), digits, strict=True):
            (root / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array[rows])))
    return root


@pytest.mark.parametrize("unpacked", [False, True])
def test_its_own_split_is_kept_and_validation_is_taken_of_train(
    unpacked: bool,
    published: Path,
    digits: Any,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    if unpacked:
        for file in published.iterdir():
            file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
            file.unlink()
    data = prepare(source="idx", path=published)
    splits, (x, y) = splits_of(data), digits
    assert {name: split.rows for name, split in data.spec.splits.items()} == {
        "train": 60,
        "validation": 10,
        "test": 30,
    }
    assert np.array_equal(splits["test"][0][..., 0], x[70:]) and np.array_equal(splits["test"][1], y[70:])
    others = {
        (image.tobytes(), int(label))
        for name in ("train", "validation")
        for image, label in zip(*splits[name], strict=True)
    }
    assert others == {(image.tobytes(), int(label)) for image, label in zip(x[:70], y[:70], strict=True)}


def test_colour_images_and_names_of_classes(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    x, y = digits
    colour = np.stack([x, 255 - x, x // 2], axis=-1)
    (tmp_path / "all-images.idx4-ubyte").write_bytes(idx(colour))
    (tmp_path / "all-labels.idx1-ubyte").write_bytes(idx(y))
    names = [f"digit {label}" for label in range(10)]
    data = prepare(source="idx", path=tmp_path, class_names=names)
    assert task_of(data.spec.task).class_names == tuple(names)
    assert data.spec.splits["train"].class_counts == (7,) * 10
    assert {image.tobytes() for images, _ in splits_of(data).values() for image in images} == {
        image.tobytes() for image in colour
    }


def test_headers_and_labels_tell_what_prepare_will_make(published: Path, prepare: Callable[..., Any]) -> None:
    preview = Idx(path=published).preview()
    spec = prepare(source="idx", path=published).spec
    assert preview.rows == sum(split.rows for split in spec.splits.values()) == 100
    task = task_of(spec.task)
    assert preview.task.image_shape_hwc == task.image_shape_hwc and not preview.problems
    assert preview.task.class_names == task.class_names


HEADER = struct.pack(">BBBBIII", 0, 0, 8, 3, 70, 8, 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not begin as IDX does"),
        (b"\x80\x04cos\nsystem\n.", "does not begin as IDX does"),
        (b"\0\0\x08\xff" + bytes(2000), "does not begin as IDX does"),
        (b"\0\0\x0d\x03" + bytes(12), "its values are of type 0x0d"),
        (HEADER[:9], "unpack requires"),
        (HEADER + bytes(70 * 64 - 1), "claims 4496 bytes and has 4495"),
        (HEADER + bytes(70 * 64 + 1), "claims 4496 bytes and has 4497"),
        (struct.pack(">BBBBIII", 0, 0, 8, 3, *[2**32 - 1] * 3), "claims 792281624"),
        (gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, *[2**32 - 1] * 3), mtime=0), "claims 792281624"),
        (gzip.compress(HEADER + bytes(70 * 64 - 1), mtime=0), "less than it claims"),
        (gzip.compress(HEADER + bytes(10**6), mtime=0), "more than it claims"),
        (gzip.compress(HEADER + bytes(70 * 64), mtime=0)[:-9], "end-of-stream"),
        (gzip.compress(HEADER + bytes(70 * 64), mtime=0)[:-8] + bytes(8), "CRC"),
    ],
)
def test_a_hostile_file_is_refused_by_its_name(
    content: bytes, reason: str, published: Path, prepare: Callable[..., Any]
) -> None:
    (published / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(StageFailed, match=re.escape(reason)) as caught:
        prepare(source="idx", path=published)
    assert "train-images-idx3-ubyte.gz" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("remove", "add", "reason"),
    [
        ("t10k-labels-idx1-ubyte.gz", {}, "no IDX file with the labels of test"),
        ("", {"train-images-idx3-ubyte": idx(np.zeros((70, 8, 8)))}, "2 IDX files with the images of train"),
        ("", {"extra-idx1": b""}, "some files are of no split: 1 file: extra-idx1"),
        ("", {"train-labels-idx1-ubyte.gz": idx(np.zeros(69))}, "do not belong together"),
        ("", {"train-images-idx3-ubyte.gz": idx(np.zeros((70, 0, 8)))}, "has the sizes (70, 0, 8)"),
        ("", {"train-images-idx3-ubyte.gz": idx(np.zeros((70, 64)))}, "has the sizes (70, 64)"),
    ],
)
def test_files_that_are_missing_or_do_not_fit_are_named(
    remove: str, add: dict[str, bytes], reason: str, published: Path, prepare: Callable[..., Any]
) -> None:
    if remove:
        (published / remove).unlink()
    for name, content in add.items():
        (published / name).write_bytes(content)
    with pytest.raises(StageFailed, match=re.escape(reason)):
        prepare(source="idx", path=published)


def test_a_folder_without_idx_files_is_refused(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    with pytest.raises(StageFailed, match="has no IDX files"):
        prepare(source="idx", path=tmp_path)
