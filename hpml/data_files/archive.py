"""Archives from outside, extracted as if each were hostile.

Only plain files and folders come out of an archive, only below the folder it is extracted to, without its
modes and owners. What may come out is limited, and counted as it comes, so a bomb is stopped early. The
folder appears whole or not at all.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, Self

from hpml.core.atomic_files import new_folder_beside
from hpml.core.errors import StageFailed

CHUNK_BYTES = 2**20
HEADER_BYTES = 2**20  # more than any honest header of a tar member takes, padding included
SMALL_BYTES = 2**20  # what any archive may hold, whatever its ratio


# What may come out of an archive: so many members, and so many bytes, in all and per byte of the archive.
MOST_MEMBERS = 500_000
MOST_BYTES = 16 * 2**30
MOST_RATIO = 100
MOST_BYTES_HELD = 64 * 2**20  # of one file that is read into memory


def most_bytes(archive_bytes: int) -> int:
    """How much may come out of an archive of `archive_bytes`."""
    return min(MOST_BYTES, max(SMALL_BYTES, MOST_RATIO * archive_bytes))


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


# The name of each file or folder of an archive, and the content of a file.
_Members = Iterator[tuple[str, _Readable | None]]


class _Damaged(Exception):
    """Why an archive is refused."""


def extract(archive: Path, to: Path) -> None:
    """Extract a .tar, .tar.gz or .zip into the new folder `to`.

    Raises StageFailed if the archive is damaged, holds anything but files and folders, reaches outside, or
    exceeds the limits above; nothing is at `to` then.
    """
    folder = new_folder_beside(to)
    try:
        with _refusing(archive), archive.open("rb") as file:
            for name, content in _counted(_members(file)):
                _write(name, content, folder)
        folder.rename(to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def small_files(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each file of an archive whose name is `wanted`; nothing is extracted.

    One is held in memory at a time. Raises StageFailed as `extract` does, or for one of more than
    MOST_BYTES_HELD.
    """
    with _refusing(archive), archive.open("rb") as file:
        for name, content in _counted(_members(file)):
            if content is None or not wanted(name):
                continue
            held = content.read(MOST_BYTES_HELD + 1)
            if len(held) > MOST_BYTES_HELD:
                raise _Damaged(f"{name!r} has more than {MOST_BYTES_HELD} bytes")
            yield name, held


def _counted(members: _Members) -> _Members:
    for number, member in enumerate(members, start=1):
        if number > MOST_MEMBERS:
            raise _Damaged(f"it has more than {MOST_MEMBERS} members")
        yield member


@contextmanager
def _refusing(archive: Path) -> Iterator[None]:
    """Turn what reading an archive of any content raises into StageFailed."""
    try:
        yield
    except _Damaged as refusal:
        raise StageFailed(
            f"the archive {archive} is refused", why=str(refusal), fix="get it from a source you trust"
        ) from None
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise StageFailed(
            f"the archive {archive} is truncated, corrupt or not a .tar, .tar.gz or .zip",
            why=str(error),
            fix="fetch it again",
        ) from None


def _members(file: BinaryIO) -> _Members:
    """Of an archive of any of the three kinds, told by its first bytes."""
    magic = file.read(4)
    limit_bytes = most_bytes(file.seek(0, os.SEEK_END))
    file.seek(0)
    if magic.startswith(b"PK"):
        return _zip_members(file, limit_bytes)
    stream = gzip.GzipFile(fileobj=file) if magic.startswith(b"\x1f\x8b") else file
    return _tar_members(_Metered(stream, limit_bytes))


def _require_within(expands_to: int, limit_bytes: int) -> None:
    if expands_to > limit_bytes:
        raise _Damaged(
            f"it expands to more than {limit_bytes} bytes (allowed are {MOST_BYTES}, and {MOST_RATIO} times"
            " its own size)"
        )


class _Metered:
    """A stream that ends in a refusal where more comes out of it than may, in all or in one step.

    step_bytes: how much the present step, a header or a file, may still take.
    """

    def __init__(self, stream: _Readable, limit_bytes: int) -> None:
        self._stream, self._limit_bytes, self._bytes = stream, limit_bytes, 0
        self.step_bytes = HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._bytes += len(data)
        self.step_bytes -= len(data)
        _require_within(self._bytes, self._limit_bytes)
        if self.step_bytes < 0:
            raise _Damaged("a member is longer than its header says, or its header is endless")
        return data


class _StrictTarInfo(tarfile.TarInfo):
    """tarfile takes a damaged header, or a missing end, for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the two zero blocks of a proper end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _tar_members(stream: _Metered) -> _Members:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictTarInfo) as archive:  # type: ignore[call-overload]
        for member in archive:
            if not (member.isdir() or member.isreg()) or member.issparse():
                raise _special(member.name)
            stream.step_bytes = member.size + HEADER_BYTES
            yield member.name, archive.extractfile(member)
            stream.step_bytes = HEADER_BYTES
    while stream.read(CHUNK_BYTES):  # to the end, where gzip checks its sum
        pass


def _zip_members(file: BinaryIO, limit_bytes: int) -> _Members:
    with zipfile.ZipFile(file) as archive:
        _require_within(
            sum(member.file_size for member in archive.infolist()), limit_bytes
        )  # zipfile reads no more
        for member in archive.infolist():
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _special(member.filename)
            if member.is_dir():
                yield member.filename, None
                continue
            if member.flag_bits & 1:
                raise _Damaged(f"{member.filename!r} is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Damaged(f"{member.filename!r} is compressed by another method than deflate")
            with archive.open(member) as content:
                yield member.filename, content


def _special(name: str) -> _Damaged:
    return _Damaged(f"{name!r} is a link, a device or another special file")


def _write(name: str, content: _Readable | None, folder: Path) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise _Damaged(f"{name!r} reaches outside the folder it is extracted to")
    place = folder / path
    try:
        (place if content is None else place.parent).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _Damaged(f"{name!r} is both a file and a folder") from None
    if content is not None:
        try:
            with place.open("xb") as file:
                shutil.copyfileobj(content, file, CHUNK_BYTES)
        except (FileExistsError, IsADirectoryError):
            raise _Damaged(f"{name!r} is in it twice") from None
