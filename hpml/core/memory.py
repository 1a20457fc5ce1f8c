"""How much memory this machine has for a process: what cannot fit is refused before it is asked for."""

from __future__ import annotations

import os

from hpml.core import cgroup, hardware
from hpml.core.process import limit_memory, proc_bytes


def total_bytes() -> int:
    """The machine's memory, or what the control group allows of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, cgroup.memory_limit_bytes() or machine)


def available_bytes() -> int:
    """How much memory this process could still take: what Linux has left, within the cgroup's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = proc_bytes("/proc/meminfo", "MemAvailable") or free
    in_group = cgroup.memory_left_bytes()
    return left if in_group is None else min(left, in_group)


def in_words(count_bytes: int) -> str:
    """ "3.2 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count_bytes >= size:
            return f"{count_bytes / size:,.1f} {unit}"
    return f"{count_bytes:,} bytes"


def limit_process() -> None:
    """Let this process, and those it starts, take no more than all memory beside what it has.

    What asks for more is then told so (a MemoryError), where Linux would promise it, and end some process
    when it is used. Not where there is a GPU: its driver maps more than it uses.
    """
    if hardware.gpu_names():
        return
    # VmData is what counts against RLIMIT_DATA so far: private memory that can be written to.
    limit_memory(total_bytes() + (proc_bytes("/proc/self/status", "VmData") or 0))
