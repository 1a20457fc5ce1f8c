"""How long the threads of a process were ready to run and had to wait for a CPU: /proc/PID/task/*/schedstat.

To the nanosecond, and only of this process: unlike /proc/pressure and /proc/stat it does not depend on what
the CPUs that the process has no use for are doing, nor on whose pod the machine also runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Waited(NamedTuple):
    """Since the threads began, all together: nanoseconds of waiting, and how often one of them got a CPU."""

    waited_ns: int
    switches: int

    def since(self, earlier: Waited) -> Waited:
        """What came after `earlier`."""
        return Waited(self.waited_ns - earlier.waited_ns, self.switches - earlier.switches)


class RunQueue:
    """The run queues of the threads that a process has when this is made. Use it as a context.

    Reading takes about a microsecond a thread: the files stay open.
    """

    def __init__(self, pid: int | str = "self") -> None:
        self._files: list[int] = []
        for task in sorted(Path(f"/proc/{pid}/task").glob("*/schedstat")):
            try:
                self._files.append(os.open(task, os.O_RDONLY))
            except OSError:  # the thread has just ended
                continue

    def __enter__(self) -> RunQueue:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def read(self) -> Waited:
        """How long they have waited by now."""
        waited_ns = switches = 0
        for _, waited, timeslices in self._numbers():
            waited_ns += int(waited)
            switches += int(timeslices)
        return Waited(waited_ns, switches)

    def ran_s(self) -> float:
        """How many seconds they have had a CPU by now."""
        return sum(int(ran) for ran, _, _ in self._numbers()) / 1e9

    def _numbers(self) -> Iterator[list[bytes]]:
        for file in self._files:
            try:
                ran, waited, timeslices = os.pread(file, 100, 0).split()
            except (OSError, ValueError):  # the thread has ended
                continue
            yield [ran, waited, timeslices]


def is_told() -> bool:
    """Whether this kernel tells it: Linux with CONFIG_SCHED_INFO, which distributions have."""
    return Path("/proc/self/schedstat").is_file()
