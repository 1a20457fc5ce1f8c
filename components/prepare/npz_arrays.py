"""Labelled images out of a `.npz` file, which may hold anything."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hpml.components.prepare.archive import most_bytes
from hpml.components.prepare.checks import refuse
from hpml.components.prepare.sources.base import Images, Preview
from hpml.core import memory
from hpml.core.errors import StageFailed
from hpml.tasks.images import batches

SPLIT = {"x_train", "y_train", "x_test", "y_test"}
TRAIN_ONLY = {"x_train", "y_train"}
PLAIN = {"x", "y"}
OPTIONAL = {"class_names"}
CHUNK_ROWS = 1024
_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(file: Path) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Train images, test images if the file has its own split, and class names.

    Raises StageFailed that says what is wrong with which array, or which rows.
    """
    arrays = read_arrays(file)
    names = set(arrays) - OPTIONAL
    if names not in (SPLIT, TRAIN_ONLY, PLAIN):
        raise StageFailed(
            f"{file} has the arrays {', '.join(sorted(arrays)) or 'none'}",
            why="allowed are x, y, or x_train, y_train with or without x_test, y_test; and class_names",
        )
    suffix = "" if names == PLAIN else "_train"
    train = _images(arrays, f"x{suffix}", f"y{suffix}")
    test = _images(arrays, "x_test", "y_test") if names == SPLIT else None
    return train, test, _class_names(arrays, train)


def preview_npz(file: Path) -> Preview | None:
    """What the headers of the arrays in `file`, and its labels, say of the images."""
    with _refusing(file):
        shapes = _declared_shapes(file)
        x_name, y_name = ("x_train", "y_train") if "x_train" in shapes else ("x", "y")
        x = shapes.get(x_name, ())
        if len(x) not in (3, 4) or y_name not in shapes:
            return None
        with np.load(file, allow_pickle=False) as arrays:
            labels = arrays[y_name]
    if not np.issubdtype(labels.dtype, np.integer) or not labels.size:
        return None
    names = shapes.get("class_names", ())
    classes = names[0] if len(names) == 1 else int(labels.max()) + 1
    channels = x[3] if len(x) == 4 else 1
    return Preview(classes, channels, (x[1], x[2]), (x[1], x[2]), images=x[0], looked_at=x[0])


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Turn what reading a file of any content raises into StageFailed."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "allow_pickle" in reason:
            reason = "an array of Python objects can run code when it is read"
        raise StageFailed(
            f"{file} is refused, truncated, corrupt or not an .npz file",
            why=reason,
            fix="write it with numpy.savez from arrays of numbers",
        ) from None


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of the file.

    Raises StageFailed if it is not an .npz file, is damaged, expands too far or holds Python objects.
    """
    with _refusing(file):
        _declared_shapes(file)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


def _declared_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every array, by its name, from the headers. Raises ValueError if out of bounds."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        expands_to = sum(member.file_size for member in members)
        if expands_to > most_bytes(file.stat().st_size):
            raise ValueError(f"it expands to {expands_to} bytes")
        if expands_to > memory.total_bytes():
            arrays, here = memory.in_words(expands_to), memory.in_words(memory.total_bytes())
            raise ValueError(f"its arrays take {arrays} of memory, this machine has {here}")
        return {member.filename.removesuffix(".npy"): _declared_shape(archive, member) for member in members}


def _declared_shape(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, ...]:
    """Refuses an array that claims to be larger than its bytes, before numpy makes room for it."""
    with archive.open(member) as content:
        version = np.lib.format.read_magic(content)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename} has format version {version}, 1.0 and 2.0 are read")
        shape, _, dtype = _HEADERS[version](content)
    claimed = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and claimed > member.file_size:
        raise ValueError(f"{member.filename} claims {claimed} bytes and has {member.file_size}")
    return tuple(shape)


def _images(arrays: dict[str, NDArray[Any]], x_name: str, y_name: str) -> Images:
    x, y = arrays[x_name], arrays[y_name]
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[-1] not in (1, 3)) or 0 in x.shape:
        raise StageFailed(
            f"{x_name} has the shape {x.shape}",
            why="allowed are (rows, height, width) and (rows, height, width, 1 or 3), channels last",
        )
    if not np.issubdtype(y.dtype, np.integer) or y.shape != (len(x),):
        raise StageFailed(
            f"{y_name} is {y.dtype} of shape {y.shape}",
            why=f"one integer for each of the {len(x)} rows of {x_name} is needed, not one-hot",
        )
    names = [f"{x_name} row {row}" for row in range(len(x))]
    pixels = _pixels(x, x_name, names)
    return Images(pixels[..., None] if pixels.ndim == 3 else pixels, y.astype(np.int64), names)


def _pixels(x: NDArray[Any], x_name: str, names: list[str]) -> NDArray[np.uint8]:
    """Integers 0 to 255, or floats 0 to 1 rounded to the nearest 255th, as uint8."""
    if x.dtype == np.uint8:
        return x
    is_float = np.issubdtype(x.dtype, np.floating)
    if not is_float and not np.issubdtype(x.dtype, np.integer):
        raise StageFailed(f"{x_name} is {x.dtype}", why="allowed are integers 0 to 255 and floats 0 to 1")
    _check_range(x, x_name, names, highest=1 if is_float else 255)
    pixels = np.empty(x.shape, dtype=np.uint8)
    for part in batches(len(x), CHUNK_ROWS):
        pixels[part] = np.rint(x[part].astype(np.float64) * 255) if is_float else x[part]
    return pixels


def _check_range(x: NDArray[Any], x_name: str, names: list[str], *, highest: int) -> None:
    finite, inside = np.empty(len(x), bool), np.empty(len(x), bool)
    for part in batches(len(x), CHUNK_ROWS):
        rows = x[part].reshape(len(x[part]), -1)
        finite[part] = np.isfinite(rows).all(axis=1)
        inside[part] = ((rows >= 0) & (rows <= highest)).all(axis=1)
    if not finite.all():
        not_finite = [names[row] for row in np.flatnonzero(~finite)]
        refuse(f"{x_name} holds NaN or infinity", not_finite, fix="correct or remove these rows")
    if not inside.all():
        outside = [names[row] for row in np.flatnonzero(~inside)]
        allowed = "floats 0 to 1" if highest == 1 else "integers 0 to 255"
        refuse(f"{x_name} is not all {allowed}", outside, fix="scale it, or store uint8 0 to 255")


def _class_names(arrays: dict[str, NDArray[Any]], train: Images) -> tuple[str, ...]:
    """What the file says, or the labels themselves."""
    given = arrays.get("class_names")
    if given is None:
        # A class without rows is refused later; here, so that a stray label does not make a million names.
        high = np.flatnonzero(train.labels >= len(train.labels))
        if len(high):
            rows = [f"{train.names[int(row)]} (label {train.labels[row]})" for row in high]
            refuse("labels are higher than there are rows", rows, fix="number the classes from 0")
        return tuple(map(str, range(int(train.labels.max()) + 1)))
    if given.dtype.kind != "U" or given.ndim != 1:
        raise StageFailed(
            f"class_names is {given.dtype} of shape {given.shape}", why="a list of strings is needed"
        )
    return tuple(map(str, given))
