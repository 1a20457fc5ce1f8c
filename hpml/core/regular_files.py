"""Files from users are opened as data only if they are regular ones: a pipe waits, a device never ends."""

from __future__ import annotations

import hashlib
import os
import stat
from functools import cache
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def problem(path: Path, *, or_folder: bool = False) -> str:
    """What `path` is or does that it cannot be read as a regular file, or a folder if that will do.

    Such as "does not exist"; empty if it can be read.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not stat.S_ISREG(mode) and not (or_folder and stat.S_ISDIR(mode)):
        wanted = "a regular file or a folder" if or_folder else "a regular file"
        return f"is {_KINDS.get(stat.S_IFMT(mode), 'a special file')}, {wanted} is needed"
    return "" if os.access(path, os.R_OK) else "may not be read"


def sha256(file: Path) -> str:
    """The SHA-256 of the content of `file`, in hex; read again only if the file has changed."""
    status = file.stat()
    return _sha256(file, status.st_size, status.st_ctime_ns)


@cache
def _sha256(file: Path, _size: int, _changed_ns: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
