"""Processes that compute in a rhythm, as a neighbour would: what tests/measure_noise.py disturbs a run with.

python -m tests.hogs PARENT PERIOD_S BUSY_S QUIET_FROM_S QUIET_TO_S is one of them; the last two are times of
the monotonic clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpml.core.process import die_with_parent

_ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def hogs(
    count: int, *, period_s: float, busy_s: float, quiet_s: tuple[float, float] = (0.0, 0.0)
) -> Iterator[None]:
    """`count` processes, each busy for `busy_s` of every `period_s`, all at the same time.

    They are quiet from and to a time of the monotonic clock, and end with this process whatever ends it.
    """
    numbers = (os.getpid(), period_s, busy_s, *quiet_s)
    command = [sys.executable, "-m", "tests.hogs", *map(str, numbers)]
    with ExitStack() as stack:
        for _ in range(count):
            stack.callback(stack.enter_context(subprocess.Popen(command, cwd=_ROOT)).kill)
        yield


def main() -> None:
    """Be one of them."""
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    period_s, busy_s, quiet_from_s, quiet_to_s = map(float, sys.argv[2:])
    while True:
        now_s = time.monotonic()
        into_s = now_s % period_s
        if quiet_from_s <= now_s < quiet_to_s:
            time.sleep(quiet_to_s - now_s)
        elif into_s < busy_s:
            sum(range(1000))
        else:
            time.sleep(period_s - into_s)


if __name__ == "__main__":
    main()
