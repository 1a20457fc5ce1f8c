"""The split, and the contract of a dataset: what breaks it is refused with its rows, or dropped if asked."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.core.errors import ExitCode, StageFailed
from hpml.tasks.image_classification.data.arrays import (
    channel_statistics,
    new_images_file,
    padded_shape,
    write_split,
)
from hpml.tasks.image_classification.data.checks import refuse
from hpml.tasks.image_classification.data.loaded import Images
from hpml.tasks.image_classification.data.splits import Split, divided, whole

# -------------------------------------------------------------------------------------------------- the split

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=200).map(lambda labels: np.array(labels, np.int64))
FRACTION = st.floats(0.01, 0.99)
SEED = st.integers(0, 2**32)


def of_labels(labels: Any) -> Split:
    """All rows of images that differ in their labels alone."""
    names = [str(row) for row in range(len(labels))]
    return whole(Images(np.zeros((len(labels), 1, 1, 1), np.uint8), labels, names))


@given(LABELS, FRACTION, SEED)
def test_every_row_is_in_exactly_one_split(labels: Any, fraction: float, seed: int) -> None:
    kept, taken = divided(of_labels(labels), fraction=fraction, seed=seed)
    assert sorted([*kept.rows, *taken.rows]) == list(range(len(labels)))


@given(LABELS, FRACTION, FRACTION, SEED)
def test_what_is_divided_twice_is_three_splits_of_all_rows(
    labels: Any, of_test: float, of_validation: float, seed: int
) -> None:
    rest, test = divided(of_labels(labels), fraction=of_test, seed=seed)
    train, validation = divided(rest, fraction=of_validation, seed=seed)
    assert sorted([*train.rows, *validation.rows, *test.rows]) == list(range(len(labels)))
    assert np.array_equal(validation.labels, labels[validation.rows])


@given(LABELS, FRACTION, SEED)
def test_every_class_is_divided_alike_and_is_on_both_sides(labels: Any, fraction: float, seed: int) -> None:
    _, taken = divided(of_labels(labels), fraction=fraction, seed=seed)
    for label in np.unique(labels):
        rows = (labels == label).sum()
        taken_rows = (taken.labels == label).sum()
        if rows >= 2:
            assert 1 <= taken_rows <= rows - 1
            assert abs(taken_rows - rows * fraction) <= 1
        else:
            assert taken_rows == 0


@given(LABELS, FRACTION, SEED)
def test_the_split_depends_on_the_seed_alone(labels: Any, fraction: float, seed: int) -> None:
    first = divided(of_labels(labels), fraction=fraction, seed=seed)
    again = divided(of_labels(labels.copy()), fraction=fraction, seed=seed)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(first, again, strict=True))


def test_the_rows_of_a_split_are_in_a_random_order() -> None:
    for split in divided(of_labels(np.repeat(np.arange(10), 100)), fraction=0.2, seed=0):
        assert len(set(split.labels[:40])) > 5


# ---------------------------------------------------------------------------------------- padding, statistics


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 3]),
    st.integers(0, 4),
    st.integers(0, 2**32),
)
def test_padding_keeps_every_pixel_in_the_middle(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    height: int,
    width: int,
    channels: int,
    more: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("padding")
    images = np.random.default_rng(seed).integers(1, 256, (rows, height, width, channels), dtype=np.uint8)
    side = max(height, width) + more
    shape = padded_shape(images.shape[1:], side)
    split = whole(Images(images, np.arange(rows), [""] * rows))
    write_split(Split(split.images, split.rows[::-1]), "some", shape, folder)
    written = np.load(folder / "some_images.npy")
    assert written.shape == (rows, side, side, channels)
    top, left = (side - height) // 2, (side - width) // 2
    assert np.array_equal(written[::-1, top : top + height, left : left + width], images)
    assert written.astype(int).sum() == images.astype(int).sum()
    assert np.load(folder / "some_labels.npy").tolist() == list(range(rows))[::-1]


def test_statistics_are_those_of_numpy_over_many_chunks(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2500, 5, 4, 3), dtype=np.uint8)
    images[..., 1] //= 3
    np.save(tmp_path / "images.npy", images)
    mean, std = channel_statistics(tmp_path / "images.npy")
    assert mean == pytest.approx((images / 255).mean(axis=(0, 1, 2)))
    assert std == pytest.approx((images / 255).std(axis=(0, 1, 2)))


def test_statistics_are_exact_to_the_last_digit_whatever_the_cpu(tmp_path: Path) -> None:
    """Sums of floats depend on the order that a BLAS chooses for this CPU."""
    images = np.random.default_rng(0).integers(0, 256, (500, 17, 13, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    mean, std = channel_statistics(tmp_path / "images.npy")
    for channel in range(3):
        levels = images[..., channel].ravel().astype(int).tolist()
        exact = Fraction(sum(levels), 255 * len(levels))
        variance = Fraction(sum(level**2 for level in levels), 255**2 * len(levels)) - exact**2
        assert mean[channel] == float(exact)
        assert std[channel] == math.sqrt(float(variance))


def test_a_disk_without_room_is_noticed_before_anything_is_written() -> None:
    with pytest.raises(OSError, match="No space left"):
        new_images_file(Path("/dev/shm/hpml-no-room.npy"), (2**20, 2**12, 2**12, 3))
    Path("/dev/shm/hpml-no-room.npy").unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- duplicates


@pytest.fixture
def poisoned(digits: Any, tmp_path: Path) -> Callable[..., Path]:
    """An .npz with its own split of 70 and 30 rows, some of them overwritten with copies of train rows."""

    def make(*, copies: dict[int, int] | None = None, relabel: dict[int, int] | None = None) -> Path:
        x, y = (array.copy() for array in digits)
        for place, origin in (copies or {}).items():
            x[place], y[place] = x[origin], y[origin]
        for place, label in (relabel or {}).items():
            y[place] = label
        arrays = {"x_train": x[:70], "y_train": y[:70], "x_test": x[70:], "y_test": y[70:]}
        np.savez(tmp_path / "poisoned.npz", **arrays)
        return tmp_path / "poisoned.npz"

    return make


def test_an_image_in_both_splits_is_refused_by_its_rows(
    poisoned: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    with pytest.raises(
        StageFailed, match=r"in several splits: 2 rows: x_train row .* = x_test row "
    ) as caught:
        prepare(source="npz", path=poisoned(copies={73: 3, 84: 14}))
    for row in (3, 14):
        assert f"x_train row {row} = x_test row {row}" in str(caught.value)
    assert "`duplicates: drop`" in str(caught.value)


def test_an_image_under_two_labels_is_refused_by_its_rows(
    poisoned: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    file = poisoned(copies={13: 3}, relabel={13: 4})
    with pytest.raises(
        StageFailed,
        match=r"under several labels: 1 row: x_train row (3 = x_train row 13|13 = x_train row 3) ",
    ):
        prepare(source="npz", path=file)


def test_only_the_first_of_many_rows_are_listed_and_all_are_counted(
    poisoned: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    with pytest.raises(StageFailed, match=r"12 rows: (x_train row \d+ = x_test row \d+,? ){3}and 9 more"):
        prepare(source="npz", path=poisoned(copies={70 + row: row for row in range(12)}))


def test_drop_takes_leaked_rows_out_of_train_and_conflicting_ones_out_of_both(
    poisoned: Callable[..., Path],
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
    training_of: Callable[..., Any],
) -> None:
    file = poisoned(copies={73: 3, 15: 5, 85: 25}, relabel={15: 6, 85: 9})
    data = prepare(source="npz", path=file, duplicates="drop")
    assert data.spec.notes == (
        "dropped 4 rows whose image is also under another label",
        "dropped 1 rows whose image is also in another split",
    )
    assert data.manifest.metrics["dropped_rows"] == 5
    before = np.load(file)
    splits = splits_of(data)
    images, labels = training_of(data)
    found = sorted(zip(map(bytes, images), labels.tolist(), strict=True))
    left = [np.delete(before[name], [3, 5, 15, 25], axis=0) for name in ("x_train", "y_train")]
    assert found == sorted(zip(map(bytes, left[0]), left[1].tolist(), strict=True))
    assert np.array_equal(splits["test"][0][..., 0], np.delete(before["x_test"], [15], axis=0))


def test_a_repeat_within_train_is_counted_and_harmless(
    poisoned: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    data = prepare(source="npz", path=poisoned(copies={13: 3, 23: 3}))
    assert data.manifest.metrics["repeated_train_rows"] == 2
    assert data.manifest.metrics["dropped_rows"] == 0
    splits = data.spec.splits
    left_out = 70 - splits["train"].rows - splits["validation"].rows  # of validation: train has them, too
    note = f"left {left_out} rows out of validation whose image is also in train"
    assert data.spec.notes == ((note,) if left_out else ())


def test_a_class_that_dropping_empties_is_refused(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    x, y = digits
    leaked = np.flatnonzero(y == 4)[:3]
    kept = np.flatnonzero(y != 4)
    train, test = np.concatenate([kept, leaked]), np.concatenate([leaked, kept[-9:]])
    np.savez(tmp_path / "set.npz", x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])
    with pytest.raises(StageFailed, match=r"not every class is in every split: .*'4' in train"):
        prepare(source="npz", path=tmp_path / "set.npz", duplicates="drop")


# --------------------------------------------------------------------------------------------- as a container


def test_a_refusal_is_one_line_exit_4_and_leaves_nothing(
    poisoned: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.dumps({"source": "npz", "path": str(poisoned(copies={73: 3}))})
    command = [
        sys.executable,
        "-m",
        "hpml.components",
        "prepare",
        "--config",
        config,
        "--out",
        str(tmp_path / "data"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.STAGE_FAILED
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "x_train row 3 = x_test row 3" in ran.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"poisoned.npz", "runs", ".data.scratch"}


def test_one_row_and_many_are_said_in_words() -> None:
    with pytest.raises(StageFailed, match="1 row: a -> mend"):
        refuse("bad", ["a"], fix="mend")
    with pytest.raises(StageFailed, match="2 files: a, b -> mend"):
        refuse("bad", ["a", "b"], fix="mend", unit="file")
