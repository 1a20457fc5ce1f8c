"""npz: arrays of anyone who can call numpy.savez, and what may be wrong with them."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.tasks import task_of


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write arrays to an .npz file."""

    def save(**arrays: Any) -> Path:
        np.savez(tmp_path / "set.npz", **arrays)
        return tmp_path / "set.npz"

    return save


def test_x_and_y_become_a_stratified_dataset(
    digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    x, y = digits
    data = prepare(source="npz", path=saved(x=x, y=y), image_size=12, licence="CC0-1.0")
    assert task_of(data.spec.task).image_shape_hwc == (12, 12, 1)
    assert task_of(data.spec.task).class_names == tuple("0123456789")
    assert data.spec.splits["train"].class_counts == (7,) * 10
    assert data.spec.splits["validation"].class_counts == (1,) * 10
    assert (data.spec.source, data.spec.licence) == ("npz", "CC0-1.0")


def test_its_own_split_and_class_names_are_kept_in_order(
    digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    x, y = digits
    names = np.array([f"digit {label}" for label in range(10)])
    parts = {"train": slice(70), "validation": slice(70, 80), "test": slice(80, None)}
    arrays = {f"{name}_{part}": a[rows] for part, rows in parts.items() for name, a in (("x", x), ("y", y))}
    file = saved(**arrays, class_names=names)
    data = prepare(source="npz", path=file)
    assert task_of(data.spec.task).class_names == tuple(names)
    for name, rows in parts.items():
        images, labels = splits_of(data)[name]
        assert np.array_equal(images[..., 0], x[rows])
        assert np.array_equal(labels, y[rows])


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int16, np.int64, np.uint32, np.float16, np.float32, np.float64]
)
def test_every_way_to_store_pixels_gives_the_same_dataset(
    dtype: type[np.generic],
    digits: Any,
    saved: Callable[..., Path],
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    x, y = digits
    stored = (x / 255).astype(dtype) if np.issubdtype(dtype, np.floating) else x.astype(dtype)
    train = {"x_train": stored[..., None], "y_train": y.astype(np.uint8)}
    file = saved(**train, x_validation=255 - x, y_validation=y, x_test=255 - x // 2, y_test=y)
    assert np.array_equal(splits_of(prepare(source="npz", path=file))["train"][0][..., 0], x)


def test_colour_stays_colour(digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]) -> None:
    x, y = digits
    colour = np.stack([x, 255 - x, x // 2], axis=-1)
    data = prepare(source="npz", path=saved(x=colour, y=y))
    assert task_of(data.spec.task).image_shape_hwc == (8, 8, 3)
    assert task_of(data.spec.task).mean[1] == pytest.approx(1 - task_of(data.spec.task).mean[0])


# ------------------------------------------------------------------------------------------------- bad arrays


def damaged(values: np.ndarray, rows: list[int], value: float) -> np.ndarray:
    values = values.copy()
    values[rows, 3, 4] = value
    return values


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x, y: {"x": damaged(x / 255, [3, 17], np.nan), "y": y}, "NaN.* 2 rows: x row 3, x row 17 "),
        (lambda x, y: {"x": damaged(x / 255, [5], -np.inf), "y": y}, "infinity: 1 row: x row 5 "),
        (lambda x, y: {"x": damaged(x / 255, [5], 1.01), "y": y}, "floats 0 to 1: 1 row: x row 5 "),
        (lambda x, y: {"x": x.astype(np.float32), "y": y}, "floats 0 to 1: 100 rows: .* and 90 more"),
        (lambda x, y: {"x": damaged(x.astype(int), [9], 256), "y": y}, "0 to 255: 1 row: x row 9 "),
        (lambda x, y: {"x": damaged(x.astype(int), [9], -1), "y": y}, "0 to 255: 1 row: x row 9 "),
        (lambda x, y: {"x": x > 9, "y": y}, "x is bool"),
        (lambda x, y: {"x": x.astype("S3"), "y": y}, "x is .S3"),
        (lambda x, y: {"x": x.astype(complex), "y": y}, "x is complex128"),
        (lambda x, y: {"x": x.astype(object), "y": y}, "array of Python objects can run code"),
        (lambda x, y: {"x": x, "y": y.astype(object)}, "array of Python objects can run code"),
        (lambda x, y: {"x": x.reshape(100, 64), "y": y}, r"shape \(100, 64\)"),
        (lambda x, y: {"x": np.stack([x] * 3, axis=1), "y": y}, "channels last"),
        (lambda x, y: {"x": x[:0], "y": y[:0]}, r"shape \(0, 8, 8\)"),
        (lambda x, y: {"x": x[:, :0], "y": y}, r"shape \(100, 0, 8\)"),
        (lambda x, y: {"x": x, "y": y[:99]}, r"y is int64 of shape \(99,\).*100 rows"),
        (lambda x, y: {"x": x, "y": y.astype(float)}, "y is float64"),
        (lambda x, y: {"x": x, "y": np.eye(10, dtype=int)[y]}, "not one-hot"),
        (
            lambda x, y: {"x": x, "y": np.where(y == 9, 10, y)},
            "1? ?.*'9' in train, '9' in validation, '9' in test",
        ),
        (lambda x, y: {"x": x, "y": np.where(np.arange(100) == 7, 10**12, y)}, r"x row 7 \(label 10{12}\)"),
        (
            lambda x, y: {"x": x, "y": np.where(np.arange(100) == 7, -1, y)},
            r"0 to 9: 1 row: x row 7 \(label -1\)",
        ),
        (lambda x, y: {"x": x, "y": y, "class_names": list("abc")}, r"0 to 2: 70 rows: .*\(label [3-9]\)"),
        (lambda x, y: {"x": x, "y": y, "class_names": list("aabcdefghi")}, "repeated.*'a'"),
        (lambda x, y: {"x": x, "y": y, "class_names": [*list("abcdefgh "), "i\n"]}, r"2 names: ' ', 'i\\n'"),
        (
            lambda x, y: {"x": x, "y": y, "class_names": list("abcdefghijk")},
            "'k' in train, 'k' in validation, 'k' in test",
        ),
        (lambda x, y: {"x": x, "y": y, "class_names": np.arange(10)}, "class_names is int64"),
        (lambda x, y: {"x": x, "y": y * 0}, "fewer than two classes"),
        (lambda x, y: {"x": x}, "has the arrays x: allowed are"),
        (lambda x, y: {"x": x, "y": y, "weights": y}, "has the arrays weights, x, y"),
        (lambda x, y: {"x_train": x, "y_train": y, "x_test": x}, "has the arrays x_test, x_train, y_train"),
        (lambda x, y: {"x": x * 0 + 7 + np.eye(8, dtype=np.uint8) * 0, "y": y}, "under several labels"),
    ],
)
def test_bad_arrays_are_refused_with_what_is_wrong(
    make: Callable[..., dict[str, Any]],
    reason: str,
    digits: Any,
    saved: Callable[..., Path],
    prepare: Callable[..., Any],
) -> None:
    with pytest.raises(StageFailed, match=reason) as caught:
        prepare(source="npz", path=saved(**make(*digits)))
    assert str(caught.value).isprintable()


def test_images_of_the_splits_must_have_one_shape(
    digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    x, y = digits
    file = saved(x_train=x[:50], y_train=y[:50], x_test=x[50:, 1:], y_test=y[50:])
    with pytest.raises(StageFailed, match=r"train 8x8x1, .*test 7x8x1"):
        prepare(source="npz", path=file)


def test_a_constant_channel_is_refused(
    digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    x, y = digits
    flat = np.stack([x, np.full_like(x, 9), x], axis=-1)
    with pytest.raises(StageFailed, match="channel 1 is 9 in every pixel"):
        prepare(source="npz", path=saved(x=flat, y=y))


# -------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(
    share: float, digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    file = saved(x=digits[0], y=digits[1])
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(StageFailed, match="truncated, corrupt or not"):
        prepare(source="npz", path=file)


def test_a_flipped_bit_is_noticed(
    digits: Any, saved: Callable[..., Path], prepare: Callable[..., Any]
) -> None:
    file = saved(x=digits[0], y=digits[1])
    content = bytearray(file.read_bytes())
    content[2000] ^= 1
    file.write_bytes(content)
    with pytest.raises(StageFailed, match="Bad CRC-32"):
        prepare(source="npz", path=file)


def npy_header(shape: tuple[int, ...], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    content = bytearray(buffer.getvalue())
    content[6:8] = bytes(version)
    return bytes(content)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"x.npy": npy_header((10**6, 10**6, 100))}, "claims 100000000000000 bytes"),
        ({"x.npy": npy_header((2,), version=(3, 0))}, "format version"),
        ({"x.npy": npy_header((2,))[:30]}, "truncated, corrupt"),
        ({"x.npy": b"cos\nsystem\n(S'touch /tmp/hpml-touched'\ntR."}, "truncated, corrupt"),
        ({"run.py": b"print()"}, "truncated, corrupt"),
        ({"x.npy": bytes(60_000_000)}, "expands to 60000000 bytes"),
        ({}, "has the arrays none"),
    ],
)
def test_a_hostile_file_is_refused_before_room_is_made_for_it(
    members: dict[str, bytes], reason: str, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    with zipfile.ZipFile(tmp_path / "set.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(StageFailed, match=reason) as caught:
        prepare(source="npz", path=tmp_path / "set.npz")
    assert "\n" not in str(caught.value)


def test_an_npy_file_or_a_pickle_is_not_an_npz(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "pickle.npz").write_bytes(b"\x80\x04}.")
    for name in ("array.npy", "pickle.npz"):
        with pytest.raises(StageFailed, match=r"not an \.npz file"):
            prepare(source="npz", path=tmp_path / name)


def test_a_missing_file_is_a_config_error_before_anything_is_read(
    tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(f"{tmp_path / 'gone.npz'} does not exist")):
        prepare(source="npz", path=tmp_path / "gone.npz")
