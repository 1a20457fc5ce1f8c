"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path


def new_folder_beside(path: Path) -> Path:
    """A fresh, empty, hidden folder on the same file system as `path`, to be renamed to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def publish(folder: Path, path: Path) -> None:
    """Rename a sealed `folder` to its place `path`.

    If `path` exists already, it holds the same content (places are named by content or are new), and the
    second copy is dropped.
    """
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(folder)
        return
    _sync(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not say of which file
        raise
    finally:
        part.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
