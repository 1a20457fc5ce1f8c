"""Archives from outside, extracted as if each were hostile.

Only plain files and folders come out of an archive, only below the folder it is extracted to, without its
modes and owners. What may come out is limited, and counted as it comes, so a bomb is stopped early. The
folder appears whole or not at all.
"""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, Self

from hpml.core.atomic_files import new_folder_beside
from hpml.core.errors import StageFailed

CHUNK_BYTES = 2**20
HEADER_BYTES = 2**20  # more than any honest header of a tar member takes, padding included
SMALL_BYTES = 2**20  # what any archive may hold, whatever its ratio


@dataclass(frozen=True)
class Limits:
    """What may come out of an archive; `ratio` is bytes out per byte of the archive."""

    members: int = 500_000
    total_bytes: int = 16 * 2**30
    ratio: int = 100


def most_bytes(archive_bytes: int, limits: Limits) -> int:
    """How much may come out of an archive of `archive_bytes`."""
    return min(limits.total_bytes, max(SMALL_BYTES, limits.ratio * archive_bytes))


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _Damaged(Exception):
    """Why an archive is refused."""


def extract(archive: Path, to: Path, *, limits: Limits | None = None) -> None:
    """Extract a .tar, .tar.gz or .zip into the new folder `to`.

    Raises StageFailed if the archive is damaged, holds anything but files and folders, reaches outside, or
    exceeds `limits`; nothing is at `to` then.
    """
    budget = _Budget(archive.stat().st_size, limits or Limits())
    folder = new_folder_beside(to)
    try:
        with archive.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(b"PK"):
                _extract_zip(file, folder, budget)
            elif magic.startswith(b"\x1f\x8b"):
                with gzip.open(file) as unzipped:
                    _extract_tar(unzipped, folder, budget)
            else:
                _extract_tar(file, folder, budget)
        folder.rename(to)
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Budget:
    """How much may still come out of one archive."""

    def __init__(self, archive_bytes: int, limits: Limits) -> None:
        self._limits = limits
        self._members = 0
        self._bytes = 0
        self._step_bytes = 0
        self._most_bytes = most_bytes(archive_bytes, limits)

    def begin(self, most_bytes: int) -> None:
        """Begin a step, a header or a file, that may take `most_bytes`."""
        self._step_bytes = most_bytes

    def spend(self, count: int) -> None:
        """Count bytes that came out."""
        self._bytes += count
        self._step_bytes -= count
        if self._bytes > self._most_bytes:
            raise _Damaged(
                f"it expands to more than {self._most_bytes} bytes (allowed are "
                f"{self._limits.total_bytes}, and {self._limits.ratio} times its own size)"
            )
        if self._step_bytes < 0:
            raise _Damaged("a member is longer than its header says, or its header is endless")

    def add_member(self) -> None:
        """Count a file or folder."""
        self._members += 1
        if self._members > self._limits.members:
            raise _Damaged(f"it has more than {self._limits.members} members")


class _Metered:
    """A stream whose bytes are charged to a budget."""

    def __init__(self, stream: _Readable, budget: _Budget) -> None:
        self._stream, self._budget = stream, budget

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._budget.spend(len(data))
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


def _extract_tar(stream: _Readable, folder: Path, budget: _Budget) -> None:
    metered = _Metered(stream, budget)
    budget.begin(HEADER_BYTES)
    with tarfile.open(fileobj=metered, mode="r|", tarinfo=_StrictTarInfo) as archive:  # type: ignore[call-overload]
        for member in archive:
            budget.add_member()
            place = _place(folder, member.name)
            if member.isdir():
                _make_folder(place, member.name)
            elif member.isreg() and not member.issparse():
                budget.begin(member.size + HEADER_BYTES)
                _write(archive.extractfile(member), place, member.name)
            else:
                raise _Damaged(f"{member.name!r} is a link, a device or another special file")
            budget.begin(HEADER_BYTES)
    while metered.read(CHUNK_BYTES):  # to the end, where gzip checks its sum
        pass


def _extract_zip(file: BinaryIO, folder: Path, budget: _Budget) -> None:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            budget.add_member()
            place = _place(folder, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _Damaged(f"{member.filename!r} is a link, a device or another special file")
            if member.is_dir():
                _make_folder(place, member.filename)
                continue
            if member.flag_bits & 1:
                raise _Damaged(f"{member.filename!r} is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Damaged(f"{member.filename!r} is compressed by another method than deflate")
            budget.begin(member.file_size)
            with archive.open(member) as content:
                _write(_Metered(content, budget), place, member.filename)


def _place(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise _Damaged(f"{name!r} reaches outside the folder it is extracted to")
    return folder / path


def _make_folder(place: Path, name: str) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _Damaged(f"{name!r} is both a file and a folder") from None


def _write(content: _Readable | None, place: Path, name: str) -> None:
    if content is None:
        raise _Damaged(f"{name!r} has no content")
    _make_folder(place.parent, name)
    try:
        with place.open("xb") as file:
            shutil.copyfileobj(content, file, CHUNK_BYTES)
    except (FileExistsError, IsADirectoryError):
        raise _Damaged(f"{name!r} is in it twice") from None
