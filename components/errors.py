"""Errors addressed to the user, their exit codes, and how they end a process. Imports nothing heavy."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NoReturn


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


class HpmlError(Exception):
    """An error addressed to the user: what happened, why, and what to do about it, on one line."""

    exit_code = ExitCode.STAGE_FAILED

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        sentence = f"{what}: {why}" if why else what
        super().__init__(_one_printable_line(f"{sentence} -> {fix}" if fix else sentence))


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
    except KeyboardInterrupt:
        _leave(HpmlError("interrupted"), ExitCode.INTERRUPTED, debug, record)
    except HpmlError as error:
        _leave(error, error.exit_code, debug, record)
    except OSError as error:
        named = _explain_os_error(error)
        _leave(named, named.exit_code, debug, record)
    except ModuleNotFoundError as error:
        absent = ConfigInvalid(
            f"the package {error.name} is not installed",
            fix="install what the stages need: make setup, or pip install 'hpml-pipeline[stages,data]'",
        )
        _leave(absent, absent.exit_code, debug, record)
    except MemoryError:
        _leave(
            StageFailed("out of memory", fix="use a smaller batch or a machine with more memory"),
            ExitCode.STAGE_FAILED,
            debug,
            record,
        )
    except Exception as error:
        named = StageFailed(
            f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
            fix="not an error we foresaw; --debug shows the traceback",
        )
        _leave(named, named.exit_code, debug, record)


def _explain_os_error(error: OSError) -> HpmlError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StageFailed(
            "the disk is full",
            why=str(error),
            fix="free some space (hpml gc removes what no kept run needs) and run again",
        )
    return StageFailed(str(error) or type(error).__name__)


def _leave(error: HpmlError, code: int, debug: bool, record: Callable[..., None] | None) -> NoReturn:
    text = traceback.format_exc()
    if record:
        with suppress(OSError):  # the disk may be what failed
            record("failed", message=str(error), exit_code=int(code), traceback=text)
    if debug:
        print(text, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(int(code))
