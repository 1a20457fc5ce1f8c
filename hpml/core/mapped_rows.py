"""Rows of arrays that are mapped from files: read by parts whose memory is bounded, or in any order."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.core.batches import batches

PART_BYTES = 4 * 2**20


def parts(array: NDArray[Any]) -> Iterator[slice]:
    """Consecutive slices of the rows of `array`, of some megabytes each, however large a row is."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    return batches(len(array), max(1, PART_BYTES // row_bytes))


def take(array: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """`array[rows]`, in memory.

    Of a file that is mapped, all these rows are asked for at once, and nothing beside them: left to itself,
    Linux waits for each page in turn and reads megabytes around it (`read_ahead_kb` of the disk), which a
    random order does not use, and for which a small control group has no room.
    """
    file = _mapping(array)
    if file is not None:
        mapping, start = file
        mapping.madvise(mmap.MADV_RANDOM)
        extent = sum(
            (size - 1) * abs(step) for size, step in zip(array.shape[1:], array.strides[1:], strict=True)
        )
        for offset in (start + rows * array.strides[0]).tolist():
            first = offset - offset % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, first, offset + extent + array.itemsize - first)
    return np.asarray(array[rows])


def _mapping(array: NDArray[Any]) -> tuple[mmap.mmap, int] | None:
    """The mapped file that `array` is a view of, and where in it the first row begins; None without one."""
    if min(array.shape, default=0) == 0 or min(array.strides) < 0:
        return None
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not isinstance(whole, np.memmap) or not isinstance(whole.base, mmap.mmap):
        return None
    in_mapping = (
        whole.offset % mmap.ALLOCATIONGRANULARITY
    )  # numpy maps from the page that the array begins in
    return whole.base, in_mapping + array.ctypes.data - whole.ctypes.data
