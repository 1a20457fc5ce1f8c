"""The arrays of a dataset, checked, the splits that are missing made, written with rows in front."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.dataset import SplitSpec
from hpml.core.batches import batches
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.core.words import counted

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays

SPLITS = ("train", "validation", "test")
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_MOST_ARRAYS = 64
_AT_ONCE = 4096  # rows: arrays may be mapped from files that are larger than memory


def write_splits(
    splits: Mapping[str, Arrays],
    out: Output,
    *,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
) -> dict[str, SplitSpec]:
    """Write `<split>_<array>.npy` for each array of each split into `out.path`.

    splits: "train" with its arrays by name, rows in front, and "validation" and "test" if there are any; one
    that is missing is drawn at random from the training rows, test before validation (see `rows_drawn`).
    Raises StageFailed that names the array, and the rows, if the splits do not have the same arrays of the
    same types and shapes, if arrays of a split differ in their rows, or hold what is no finite number.
    """
    given = _checked(splits)
    rows_of = {name: np.arange(_rows(arrays)) for name, arrays in given.items()}
    origin = {name: given.get(name, given["train"]) for name in SPLITS}
    random = np.random.default_rng(seed)
    for name, fraction in (("test", test_fraction), ("validation", validation_fraction)):
        if name not in given:
            left = random.permutation(rows_of["train"])
            count = rows_drawn(len(left), fraction)
            rows_of[name], rows_of["train"] = np.sort(left[:count]), np.sort(left[count:])
    empty = [name for name in SPLITS if not len(rows_of[name])]
    if empty:
        told = ", ".join(f"{split} {_rows(arrays):,}" for split, arrays in given.items())
        raise StageFailed(
            f"no rows are left for {' and '.join(empty)}", why=f"the data has {told}", fix="give more rows"
        )
    for name in SPLITS:
        for key, array in origin[name].items():
            _write(array, rows_of[name], out, f"{name}_{key}")
    return {name: SplitSpec(rows=len(rows_of[name])) for name in SPLITS}


def rows_drawn(rows: int, fraction: float) -> int:
    """How many of `rows` make up a split of this share of them.

    The nearest whole number, but at least one row is on either side where there are two.
    """
    return min(max(round(rows * fraction), 1), rows - 1) if rows else 0


def _checked(splits: Mapping[str, Arrays]) -> dict[str, dict[str, NDArray[Any]]]:
    if not isinstance(splits, Mapping) or "train" not in splits or not set(splits) <= set(SPLITS):
        given = ", ".join(map(str, splits)) if isinstance(splits, Mapping) else type(splits).__name__
        raise StageFailed(
            "the data are not splits",
            why=f"given: {given or 'nothing'}",
            fix="give a dict with train, and if you like validation and test",
        )
    schema: dict[str, tuple[str, tuple[int, ...]]] = {}
    for split, arrays in splits.items():
        if not isinstance(arrays, Mapping) or not 0 < len(arrays) <= _MOST_ARRAYS:
            raise StageFailed(f"the split {split} is not a dict of 1 to {_MOST_ARRAYS} arrays")
        for name, array in arrays.items():
            _check_kind(split, name, array)
        rows = {name: len(array) for name, array in arrays.items()}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"{name} {count:,}" for name, count in rows.items())
            raise StageFailed(f"the arrays of {split} do not have as many rows as each other", why=told)
        found = {name: (str(array.dtype), array.shape[1:]) for name, array in arrays.items()}
        schema = schema or found
        if found != schema:
            raise StageFailed(
                "the splits do not have the same arrays",
                why=f"in {split} there are {_in_words(found)}, in {next(iter(splits))} {_in_words(schema)}",
            )
    return {split: dict(arrays) for split, arrays in splits.items()}


def _check_kind(split: str, name: object, array: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StageFailed(
            f"{name!r} is no name for an array",
            fix="use small letters, digits and _, at most 63, the first a letter",
        )
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise StageFailed(f"{name!r} of {split} is not an array with rows in front", why=f"{type(array)}")
    if str(array.dtype) not in _DTYPES:
        raise StageFailed(
            f"{name!r} of {split} holds {array.dtype}", why=f"allowed: {', '.join(_DTYPES)}", fix="convert it"
        )
    wrong = [
        str(part.start + row)
        for part in batches(len(array), _AT_ONCE)
        for row in np.flatnonzero(~np.isfinite(array[part]).reshape(len(array[part]), -1).all(axis=1))
    ]
    if wrong:
        raise StageFailed(
            f"{name!r} of {split} holds what is no finite number",
            why=f"in {counted(wrong, 'row')}",
            fix="leave these rows out, or fill in what is missing",
        )


def _rows(arrays: Arrays) -> int:
    return len(next(iter(arrays.values())))


def _write(array: NDArray[Any], rows: NDArray[np.int64], out: Output, name: str) -> None:
    written = np.lib.format.open_memmap(
        out.path / f"{name}.npy", mode="w+", dtype=array.dtype, shape=(len(rows), *array.shape[1:])
    )
    for part in batches(len(rows), _AT_ONCE):
        written[part] = array[rows[part]]
    written.flush()


def _in_words(schema: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in schema.items())
