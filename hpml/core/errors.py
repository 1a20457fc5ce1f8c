"""Errors addressed to the user, their exit codes, and how they end a process. Imports nothing heavy."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

_NO_ROOM = re.compile(r"no space left on device|disk quota exceeded|disk is full", re.IGNORECASE)
_LEAST_FREE_BYTES = 64 << 10  # with less, whatever failed failed for lack of room


class ExitCode(IntEnum):
    """What the process exit status of the command and of every container means."""

    DONE = 0
    USAGE = 2
    CONFIG_INVALID = 3
    STAGE_FAILED = 4
    GATE_FAILED = 5
    UNAVAILABLE = 6
    INTERRUPTED = 130
    TERMINATED = 143


_MOST_CHARACTERS = 2_000  # of each part of a message; values from outside can have any length


class HpmlError(Exception):
    """An error addressed to the user: what happened, why, and what to do about it, on one line."""

    exit_code = ExitCode.STAGE_FAILED

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        what, why, fix = (shortened(part, _MOST_CHARACTERS) for part in (what, why, fix))
        self.what, self.why, self.fix = what, why, fix
        sentence = f"{what}: {why}" if why else what
        super().__init__(_one_printable_line(f"{sentence} -> {fix}" if fix else sentence))


def shortened(text: str, most: int = 80) -> str:
    """`text`, or both its ends and how long it is where it has more than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most * 3 // 4]}... ({len(text):,} characters) ...{text[-(most // 4) :]}"


def _one_printable_line(text: str) -> str:
    """`text` without line breaks and without what could steer a terminal; names come from outside."""
    flat = " ".join(text.split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in flat)


class UsageError(HpmlError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class ConfigInvalid(HpmlError):
    """A recipe or a stage's config is wrong, or asks for what this machine does not have."""

    exit_code = ExitCode.CONFIG_INVALID


class StageFailed(HpmlError):
    """A stage could not do its work: bad data, a crash, a full disk, a loss that became NaN."""


class GateFailed(HpmlError):
    """The work was done and is not good enough: accuracy, agreement, latency."""

    exit_code = ExitCode.GATE_FAILED


class Unavailable(HpmlError):
    """Something outside that is needed does not answer: a cluster, a registry, a store."""

    exit_code = ExitCode.UNAVAILABLE


class Interrupted(HpmlError):
    """Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(HpmlError):
    """A stage was asked to stop (SIGTERM), saved what it had, and can be resumed."""

    exit_code = ExitCode.TERMINATED


@contextmanager
def explained(*, debug: bool = False, record: Callable[..., None] | None = None) -> Iterator[None]:
    """Turn whatever goes wrong inside into one line on stderr and the right exit status.

    The line and the traceback also go to `record`, such as `Events.write`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        told, text = _told(error), traceback.format_exc()
        if record:
            with suppress(OSError):  # the disk may be what failed
                record("failed", message=str(told), exit_code=int(told.exit_code), traceback=text)
        if debug:
            print(text, file=sys.stderr)
        print(f"error: {told}", file=sys.stderr, flush=True)
        raise SystemExit(int(told.exit_code)) from None


def _told(error: BaseException) -> HpmlError:
    """What the user is told of `error`."""
    if isinstance(error, HpmlError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, ModuleNotFoundError):
        return ConfigInvalid(
            f"the package {error.name} is not installed",
            fix="install what the stages need: make setup, or pip install 'hpml-pipeline[stages,data]'",
        )
    if known := _out_of_memory(error) or disk_full(error):
        return known
    if isinstance(error, OSError):
        return StageFailed(str(error) or type(error).__name__)
    return StageFailed(
        f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
        fix="not an error we foresaw; --debug shows the traceback",
    )


def disk_full(error: BaseException, place: str | os.PathLike[str] = "") -> StageFailed | None:
    """What to tell the user if a full disk is behind `error`, with the path and its free space; else None.

    place: where was written, if the error does not say so. Libraries spell a full disk in their own ways, or
    say no more than that a file is cut short: so that no room is left at `place` counts as well.
    """
    path, said = os.fspath(place), ""
    for cause in causes(error):
        named = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if named or _NO_ROOM.search(str(cause)):
            path = str(getattr(cause, "filename", None) or path)
            break
    else:
        if not path or _free_bytes(path) >= _LEAST_FREE_BYTES:
            return None
        said = f" ({type(error).__name__}: {str(error)[:200]})"
    return StageFailed(
        "the disk is full",
        why=f"{path} has {_free_bytes(path) / 1e6:.1f} MB left{said}" if path else str(error),
        fix="free some space (hpml gc removes what no kept run needs) and run again",
    )


@contextmanager
def disk_full_explained(place: str | os.PathLike[str]) -> Iterator[None]:
    """Raise StageFailed that says so if what is written to `place` meanwhile fails of a full disk."""
    try:
        yield
    except HpmlError:
        raise
    except Exception as error:
        full = disk_full(error, place)
        if full:
            raise full from error
        raise


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what is behind it, the outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free_bytes(path: str) -> int:
    """What is free to this user on the disk of `path`, or of the nearest folder above it that is there."""
    while True:
        try:
            status = os.statvfs(path or ".")
        except FileNotFoundError:
            path = os.path.dirname(path)  # noqa: PTH120 - pathlib is not imported here
        else:
            return status.f_bavail * status.f_frsize


def _out_of_memory(error: BaseException) -> StageFailed | None:
    """The error to show if `error` says, in Python's, torch's or CUDA's way, that memory ran out."""
    said = " ".join(str(error).split())
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in said
    if not isinstance(error, MemoryError) and not is_torchs:
        return None
    return StageFailed(
        "out of memory", why=said[:300], fix="use a smaller batch, model or image_size, or a larger machine"
    )
