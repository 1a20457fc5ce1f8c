"""Files that a user names in a config: are they there, did they change, and what is inside an archive."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from components.contract import Output


def unmet(path: Path) -> str:
    """Why `path` cannot be read; empty if it can."""
    if os.access(path, os.R_OK):
        return ""
    return f"{path} does not exist or may not be read: check `path` in the recipe"


def fingerprint(path: Path) -> str:
    """A digest of the names, sizes and modification times of the files at `path`; empty if it cannot be read.

    Not of their contents, so that asking costs milliseconds: a file rewritten in place with the same size and
    its old modification time restored goes unseen.
    """
    if unmet(path):
        return ""
    digest = hashlib.sha256()
    for name, status in _files(path):
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a folder, in a fixed order, by its relative name; or the one file itself, as ''."""
    if path.is_file():
        yield "", path.stat()
        return
    for folder, subfolders, names in os.walk(path, followlinks=True):
        subfolders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            yield str(file.relative_to(path)), file.lstat() if not file.exists() else file.stat()


def open_folder(path: Path, out: Output) -> Path:
    """`path` itself if it is a folder, else the folder extracted from it as an archive.

    Raises StageFailed if the archive is damaged or hostile.
    """
    from components.prepare.archive import extract

    if path.is_dir():
        return path
    place = out.scratch / "extracted"
    shutil.rmtree(place, ignore_errors=True)  # of an attempt that was interrupted after it
    extract(path, place)
    return place


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
