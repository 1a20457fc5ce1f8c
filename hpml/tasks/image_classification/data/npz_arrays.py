"""Labelled images out of a `.npz` file, which may hold anything."""

from __future__ import annotations

import math
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hpml.core import memory
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed
from hpml.core.mapped_rows import parts
from hpml.data_files.archive import most_bytes
from hpml.data_files.split_names import SPLITS
from hpml.tasks.image_classification.data.arrays import new_images_file
from hpml.tasks.image_classification.data.checks import refuse
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview, RowNames

PLAIN = {"x", "y"}
OPTIONAL = {"class_names"}
COPIED_BYTES = 2**20
_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(file: Path, scratch: Path) -> tuple[dict[str, Images], tuple[str, ...]]:
    """The images of each split that the file has, mapped from files in `scratch`, and the class names.

    Raises StageFailed that says what is wrong with which array, or which rows.
    """
    arrays = _unpacked(file, scratch)
    names = set(arrays) - OPTIONAL
    splits = [name for name in SPLITS if f"x_{name}" in names]
    needed = {f"{array}_{name}" for name in ("train", *splits) for array in "xy"}
    if names not in (PLAIN, needed):
        raise StageFailed(
            f"{file} has the arrays {', '.join(sorted(arrays)) or 'none'}",
            why="allowed are x, y, or x_train, y_train with or without the like of validation and test; and"
            " class_names",
        )
    if names == PLAIN:
        images = {"train": _images(arrays, "x", "y", scratch)}
    else:
        images = {name: _images(arrays, f"x_{name}", f"y_{name}", scratch) for name in splits}
    return images, _class_names(arrays, images["train"])


def preview_npz(file: Path) -> PicturesPreview | None:
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
    return PicturesPreview(classes, channels, (x[1], x[2]), (x[1], x[2]), images=x[0], looked_at=x[0])


@contextmanager
def _refusing(file: Path, kind: type[HpmlError] = StageFailed) -> Iterator[None]:
    """Turn what reading a file of any content raises into a `kind` of error."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "allow_pickle" in reason or "Python objects" in reason:
            reason = "an array of Python objects can run code when it is read"
        raise kind(
            f"{file} is refused, truncated, corrupt or not an .npz file",
            why=reason,
            fix="write it with numpy.savez from arrays of numbers",
        ) from None


def _unpacked(file: Path, scratch: Path) -> dict[str, NDArray[Any]]:
    """All arrays of the file, each unpacked into a file in `scratch`, and mapped from there: they may be
    larger than memory. Raises StageFailed for what `read_arrays` refuses.
    """
    with _refusing(file):
        _declared_shapes(file)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for number, member in enumerate(members):
                with archive.open(member) as packed, (scratch / f"{number}.npy").open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, COPIED_BYTES)
        return {
            member.filename.removesuffix(".npy"): np.load(
                scratch / f"{number}.npy", mmap_mode="r", allow_pickle=False
            )
            for number, member in enumerate(members)
        }


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of the file, which a command was given, in memory.

    Raises ConfigInvalid if it is not an .npz file, is damaged, expands too far or holds Python objects.
    """
    with _refusing(file, ConfigInvalid):
        _declared_shapes(file)
        _require_memory(file)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)


def _declared_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every array, by its name, from the headers. Raises ValueError if out of bounds."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        expands_to = sum(member.file_size for member in members)
        if expands_to > most_bytes(file.stat().st_size):
            raise ValueError(f"it expands to {expands_to} bytes")
        return {member.filename.removesuffix(".npy"): _declared_shape(archive, member) for member in members}


def _require_memory(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        expands_to = sum(member.file_size for member in archive.infolist())
    if expands_to > memory.total_bytes():
        arrays, here = memory.in_words(expands_to), memory.in_words(memory.total_bytes())
        raise ValueError(f"its arrays take {arrays} of memory, this machine has {here}")


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


def _images(arrays: dict[str, NDArray[Any]], x_name: str, y_name: str, scratch: Path) -> Images:
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
    names = RowNames(f"{x_name} row", len(x))
    x_nhwc = x[..., None] if x.ndim == 3 else x
    return Images(_pixels(x_nhwc, x_name, names, scratch), y.astype(np.int64), names)


def _pixels(x: NDArray[Any], x_name: str, names: Sequence[str], scratch: Path) -> NDArray[np.uint8]:
    """Integers 0 to 255, or floats 0 to 1 rounded to the nearest 255th, as uint8; in a file if x is not."""
    if x.dtype == np.uint8:
        return x
    is_float = np.issubdtype(x.dtype, np.floating)
    if not is_float and not np.issubdtype(x.dtype, np.integer):
        raise StageFailed(f"{x_name} is {x.dtype}", why="allowed are integers 0 to 255 and floats 0 to 1")
    _check_range(x, x_name, names, highest=1 if is_float else 255)
    pixels = new_images_file(scratch / f"{x_name}_pixels.npy", x.shape)
    for part in parts(x):
        pixels[part] = np.rint(x[part].astype(np.float64) * 255) if is_float else x[part]
    return pixels


def _check_range(x: NDArray[Any], x_name: str, names: Sequence[str], *, highest: int) -> None:
    finite, inside = np.empty(len(x), bool), np.empty(len(x), bool)
    for part in parts(x):
        rows = x[part].reshape(len(x[part]), -1)
        finite[part] = np.isfinite(rows).all(axis=1)
        inside[part] = ((rows >= 0) & (rows <= highest)).all(axis=1)
    if not finite.all():
        not_finite = [names[row] for row in np.flatnonzero(~finite).tolist()]
        refuse(f"{x_name} holds NaN or infinity", not_finite, fix="correct or remove these rows")
    if not inside.all():
        outside = [names[row] for row in np.flatnonzero(~inside).tolist()]
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
