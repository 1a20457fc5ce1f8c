"""Streams of tokens in .npy files: written piece by piece, read as windows without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest that torch can index on a GPU, too: there it cannot index uint16."""
    return np.dtype(np.int16 if vocabulary_size <= 2**15 else np.int32)


class TokenWriter:
    """A one-dimensional .npy file that grows; whole when it is left."""

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype, self.count = file.open("wb"), dtype, 0

    def __enter__(self) -> Self:
        self._write_header()
        return self

    def append(self, tokens: Sequence[int]) -> None:
        """Write them after those before."""
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self.count += len(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """numpy pads it, so that of any count it has the same size."""
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, described)


def window_count(tokens: int, context: int) -> int:
    """How many windows a stream of so many tokens has."""
    return max(tokens - 1, 0) // context


def windows(tokens: NDArray[Any], context: int) -> NDArray[Any]:
    """A view (rows, context + 1): each row begins with the token that the one before ends with.

    So every token of the stream but the first is predicted once; less than a window at its end is left out.
    """
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
