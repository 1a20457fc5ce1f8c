"""How much memory this machine has for a process: what cannot fit is refused before it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

from hpml.core import cgroup, hardware
from hpml.core.process import limit_memory


def total_bytes() -> int:
    """The machine's memory, or what the control group allows of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, cgroup.memory_limit_bytes() or machine)


def available_bytes() -> int:
    """How much memory this process could still take: what Linux has left, within the cgroup's limit."""
    left = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            left = [int(line.split()[1]) * 1024]
    in_group = cgroup.memory_left_bytes()
    if in_group is not None:
        left.append(in_group)
    return max(0, min(left))


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
    limit_memory(total_bytes() + _data_bytes())


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA so far: private memory that can be written to."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
