"""One rollout of a name at a time on this machine, by a lock on a file that says who has it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from hpml.core.errors import Unavailable
from hpml.pipelines.delivery.evidence import deployer

_LOOK_EVERY_S = 0.1
_MOST_CHARACTERS = 500  # of who has it


@contextmanager
def held(file: Path, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """While entered, nobody else has it; a process that is killed loses it.

    The file stays: who waits for it could otherwise lock one that nobody finds any more.
    Raises Unavailable naming who has it after `wait_s`.
    """
    with file.open("a+", errors="replace") as content:
        _acquire(content, wait_s, say)
        _write(content, f"{deployer()}, since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}")
        try:
            yield
        finally:
            _write(content, "")


def _acquire(content: IO[str], wait_s: float, say: Callable[[str], None]) -> None:
    until_s, told = time.monotonic() + wait_s, ""
    while not _is_ours(content):
        content.seek(0)
        holder = content.read(_MOST_CHARACTERS) or "another process"
        if time.monotonic() > until_s:
            raise Unavailable(
                f"another rollout is under way, by {holder}",
                fix="wait until it has ended; --wait-s is how long",
            )
        if holder != told:
            say(f"waiting for the rollout of {holder}")
            told = holder
        time.sleep(_LOOK_EVERY_S)


def _is_ours(content: IO[str]) -> bool:
    try:
        fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(content: IO[str], holder: str) -> None:
    content.truncate(0)
    content.write(holder)
    content.flush()
