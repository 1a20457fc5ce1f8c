"""Files that a user names in a config: are they there, did they change, and what is inside an archive.

They are at a path of this machine, or at s3://BUCKET/KEY: an object, or all whose keys begin with KEY/.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpml.core import regular_files
from hpml.core.contract import Output, canonical_json
from hpml.core.errors import StageFailed
from hpml.io import storage
from hpml.io.storage import S3Uri

UserPath = S3Uri | Path


def unsupported_reason(path: UserPath, *, or_folder: bool = True) -> str:
    """Why `path` cannot be read; empty if it can, or if it is in S3, which is asked when it is read."""
    why = "" if isinstance(path, str) else regular_files.problem(path, or_folder=or_folder)
    return f"{path} {why}: check `path` in the recipe" if why else ""


def missing_package(package: str, extra: str) -> str:
    """How to install a package that reading needs; empty if it is there."""
    if importlib.util.find_spec(package):
        return ""
    return f"{package} is not installed: pip install 'hpml-pipeline[{extra}]'"


def fingerprint(path: UserPath) -> str:
    """A digest of the names, sizes and modification times of the files at `path`; empty if it cannot be read.

    Not of their contents, so that asking costs milliseconds: a file rewritten in place with the same size and
    its old modification time restored goes unseen. In S3, of the names and ETags; raises Unavailable.
    """
    if isinstance(path, str):
        return hashlib.sha256(canonical_json(storage.etags(path)).encode()).hexdigest()
    if unsupported_reason(path):
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
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            yield str(file.relative_to(path)), file.lstat() if not file.exists() else file.stat()


def here(path: UserPath, out: Output) -> Path:
    """`path` on this machine: itself, or what was fetched from S3.

    Raises StageFailed if there is nothing at the URI, Unavailable.
    """
    if not isinstance(path, str):
        return path
    place = out.scratch / "fetched"
    shutil.rmtree(place, ignore_errors=True)
    found = storage.etags(path)
    if not found:
        raise StageFailed(f"there is nothing at {path}", fix="check `path` in the recipe")
    if "" not in found:
        return storage.fetch(path, place)
    place.mkdir(parents=True)
    file = place / path.rpartition("/")[2]
    storage.fetch_file(path, file)
    return file


def all_here(paths: Sequence[UserPath], out: Output) -> list[Path]:
    """Several paths on this machine, those of S3 fetched below one folder, each by its own key.

    Raises StageFailed if there is nothing at one of the URIs, Unavailable.
    """
    if len(paths) == 1:
        return [here(paths[0], out)]
    place, found = out.scratch / "fetched", []
    shutil.rmtree(place, ignore_errors=True)
    for path in paths:
        if isinstance(path, str):
            file = place / path.removeprefix("s3://")
            file.parent.mkdir(parents=True, exist_ok=True)
            storage.fetch_file(path, file)
            path = file
        found.append(path)
    return found


def open_folder(given: UserPath, out: Output) -> Path:
    """The folder at a path or URI, or the folder extracted from the archive there.

    Raises StageFailed if the archive is damaged or hostile, or there is nothing at the URI; Unavailable.
    """
    from hpml.data_files.archive import extract

    path = here(given, out)
    if path.is_dir():
        return path
    place = out.scratch / "extracted"
    shutil.rmtree(place, ignore_errors=True)  # of an attempt that was interrupted after it
    extract(path, place)
    return place


def require_sha256(path: Path, expected: str, *, given: UserPath, fix: str) -> None:
    """Raise StageFailed, with `fix`, if the file at `path`, which came from `given`, has another SHA-256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise StageFailed(
            f"{given} is not the file that was asked for",
            why=f"its SHA-256 is {found}, the recipe says {expected}",
            fix=fix,
        )
