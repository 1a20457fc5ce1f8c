"""IDX, the format of MNIST (yann.lecun.com/exdb/mnist): a header of big-endian sizes, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpml.core import regular_files
from hpml.core.errors import StageFailed
from hpml.data_files.archive import CHUNK_BYTES, most_bytes

UNSIGNED_BYTE = 8
MOST_DIMENSIONS = 4


class IdxFile:
    """A file of unsigned bytes, gzipped or not, whose header is read at once, and nothing else.

    Raises StageFailed, here and when it is read, if it is no such file, or holds more or less than it claims.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._refusing(), self._open() as file:
            self._is_packed = isinstance(file, gzip.GzipFile)
            start = file.read(4)
            if len(start) < 4 or start[:2] != b"\0\0" or not 1 <= start[3] <= MOST_DIMENSIONS:
                raise ValueError("it does not begin as IDX does")
            if start[2] != UNSIGNED_BYTE:
                raise ValueError(f"its values are of type {start[2]:#04x}, unsigned bytes (0x08) are read")
            self._header_bytes = 4 + 4 * start[3]
            self.shape = struct.unpack(f">{start[3]}I", file.read(4 * start[3]))
            claimed = self._header_bytes + math.prod(self.shape)
            size_bytes = path.stat().st_size
            if self._is_packed and claimed > most_bytes(size_bytes):
                raise ValueError(f"it claims {claimed} bytes, out of {size_bytes} that are packed")
            if not self._is_packed and claimed != size_bytes:
                raise ValueError(f"it claims {claimed} bytes and has {size_bytes}")

    def read(self) -> NDArray[np.uint8]:
        """Its values, in memory."""
        return np.frombuffer(b"".join(self._content()), np.uint8).reshape(self.shape)

    def mapped(self, scratch: Path) -> NDArray[np.uint8]:
        """Its values, mapped from the file, or from a file in `scratch` that it is unpacked to."""
        place, offset = self.path, self._header_bytes
        if self._is_packed:
            place, offset = scratch / f"{self.path.name}.unpacked", 0
            with place.open("wb") as unpacked:
                unpacked.writelines(self._content())
        return np.memmap(place, np.uint8, mode="r", offset=offset, shape=self.shape)

    def _content(self) -> Iterator[bytes]:
        """All bytes after the header; no more than it claims are unpacked."""
        remaining = math.prod(self.shape)
        with self._refusing(), self._open() as file:
            file.read(self._header_bytes)
            while remaining and (chunk := file.read(min(CHUNK_BYTES, remaining))):
                remaining -= len(chunk)
                yield chunk
            if remaining or file.read(1):  # reading to the end also checks gzip's sum
                raise ValueError(
                    "it holds less than it claims" if remaining else "it holds more than it claims"
                )

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | gzip.GzipFile]:
        if why := regular_files.problem(self.path):
            raise ValueError(f"it {why}")
        with self.path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_packed else file

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what reading a file of any content raises into StageFailed."""
        try:
            yield
        except (ValueError, struct.error, OSError, EOFError, zlib.error) as error:
            raise StageFailed(
                f"{self.path} is refused, truncated, corrupt or not an IDX file of unsigned bytes",
                why=" ".join(str(error).split()),
                fix="fetch it again",
            ) from None
