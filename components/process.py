"""Processes that end with the one that started them, whatever ended that."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when `parent`, which started it, ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)
