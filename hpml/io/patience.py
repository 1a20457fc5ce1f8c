"""Waiting for what is out of order to come back: said aloud, and for about two minutes at most."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from hpml.core.errors import HpmlError

PAUSES_S = (1, 2, 4, 8, 16, 32, 60)  # between attempts

T = TypeVar("T")


def patiently(attempt: Callable[[], T], *, outage: type[HpmlError]) -> T:
    """What `attempt` returns, asked again after each of PAUSES_S while it raises an `outage`.

    Each wait is announced on stderr with its cause. What the last attempt raises, and whatever is no
    `outage`, goes to the caller. `attempt` must be such that repeating it does no harm.
    """
    for number, pause_s in enumerate(PAUSES_S, start=1):
        try:
            return attempt()
        except outage as error:
            cause = f"{error.what}: {error.why}" if error.why else error.what
            print(
                f"{cause}; attempt {number} of {len(PAUSES_S) + 1}, the next in {pause_s} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(pause_s)
    return attempt()
