"""How long the threads of a process were ready to run and had to wait for a CPU: /proc/PID/task/*/schedstat.

To the nanosecond, and only of this process: unlike /proc/pressure and /proc/stat it does not depend on what
the CPUs that the process has no use for are doing, nor on whose pod the machine also runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple


class Waited(NamedTuple):
    """Since a thread began: nanoseconds of waiting, how often it got a CPU, and nanoseconds that it ran.

    A wait is counted when it is over, not while it lasts.
    """

    waited_ns: int
    switches: int
    ran_ns: int

    def since(self, earlier: Waited) -> Waited:
        """What came after `earlier`."""
        return Waited(*(now - then for now, then in zip(self, earlier, strict=True)))


Reading = tuple[int, dict[int, Waited]]  # the clock in ns, and what each thread had waited by then


class RunQueue:
    """The run queues of the threads that a process has when this is made. Use it as a context.

    Reading takes about two microseconds a thread: the files stay open. For how long threads ran is known to
    the nanosecond of this process, of others up to their last interruption, some milliseconds ago at most.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._is_own = pid is None
        self._files: dict[int, int] = {}  # of each thread
        for task in sorted(Path(f"/proc/{pid or 'self'}/task").glob("*/schedstat")):
            try:
                self._files[int(task.parent.name)] = os.open(task, os.O_RDONLY)
            except OSError:  # the thread has just ended
                continue

    def __enter__(self) -> RunQueue:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self) -> dict[int, Waited]:
        """How long each thread has waited by now, by its number; those that have ended are left out."""
        found = {}
        for thread, file in self._files.items():
            try:
                ran, waited, switches = os.pread(file, 100, 0).split()
                ran_ns = time.clock_gettime_ns(_cpu_clock(thread)) if self._is_own else int(ran)
            except (OSError, ValueError):  # the thread has ended
                continue
            found[thread] = Waited(int(waited), int(switches), ran_ns)
        return found

    def total(self) -> Waited:
        """That of all threads together."""
        return Waited(*map(sum, zip(Waited(0, 0, 0), *self.read().values(), strict=True)))


def _cpu_clock(thread: int) -> int:
    """The clock of the time that a thread of this process runs: CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED."""
    return ~thread << 3 | 6


def schedstat_available() -> bool:
    """Whether this kernel tells it: Linux with CONFIG_SCHED_INFO, which distributions have."""
    return Path("/proc/self/schedstat").is_file()
