"""How far the CPUs are from each other: how long a cache line takes from one to another and back.

On a cloud the host moves virtual CPUs between core complexes: two of them share a cache for seconds, and then
do not. Whatever hands data from thread to thread has another speed then. Two processes, each pinned to a CPU,
take turns at changing one shared byte. In Python a turn costs some 100 ns of its own, which blurs nothing: a
line from another complex takes several times as long. Each pair takes some 5 ms.

python -m hpml.measuring.machine.core_latency_probe DESCRIPTOR PARENT_PID is the second of the two processes.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, median

import hpml
from hpml.core.errors import StageFailed
from hpml.core.process import die_with_parent

_MOST_PAIRS = 3  # of more than two CPUs; the same ones, spread evenly, each time
_CHUNKS, _TURNS = 100, 50  # a chunk that something interrupts does not move the median of all
_PATIENCE = 1_000_000  # looks at the byte, some 50 ms, between two looks at the other process


class CoreLatencyProbe:
    """The probe. Use it as a context: it holds the second process, which sleeps between probes.

    cpus: those that the engines may use. pairs: those of them that `round_trip_ns` is about.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        every = list(combinations(cpus, 2))
        self.pairs = tuple(every[:: max(1, len(every) // _MOST_PAIRS)][:_MOST_PAIRS])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CoreLatencyProbe:
        if not self.pairs:
            return self
        descriptor = os.memfd_create("cache-line")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._line = mmap.mmap(descriptor, mmap.PAGESIZE)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(descriptor), str(os.getpid())],
                cwd=Path(hpml.__file__).parents[1],
                stdin=subprocess.PIPE,
                pass_fds=[descriptor],
            )
        finally:
            os.close(descriptor)
        self.between(*self.pairs[0])  # the first one starts an interpreter
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._line.close()

    def round_trip_ns(self) -> float | None:
        """The geometric mean over the pairs, now; None with one CPU."""
        if not self.pairs:
            return None
        return geometric_mean(self.between(*pair) for pair in self.pairs)

    def between(self, one: int, other: int) -> float:
        """The nanoseconds of a round trip between two CPUs, now.

        Raises StageFailed if the second process is gone.
        """
        assert self._process and self._process.stdin
        allowed = os.sched_getaffinity(0)
        self._process.stdin.write(f"{other}\n".encode())
        self._process.stdin.flush()
        os.sched_setaffinity(0, {one})
        try:
            self._turns(1)  # until the other one is there
            took_ns = []
            for _ in range(_CHUNKS):
                begun_ns = time.perf_counter_ns()
                self._turns(_TURNS)
                took_ns.append((time.perf_counter_ns() - begun_ns) / _TURNS)
        finally:
            os.sched_setaffinity(0, allowed)
        return median(took_ns)

    def _turns(self, turns: int) -> None:
        line = self._line
        for _ in range(turns):
            line[0] = 1
            patience = _PATIENCE
            while line[0]:
                patience -= 1
                if not patience:
                    self._check_alive()
                    patience = _PATIENCE

    def _check_alive(self) -> None:
        assert self._process
        if self._process.poll() is not None:
            raise StageFailed("the probe of the distance between the CPUs ended", why="its process is gone")


def main() -> None:
    """Answer the first process: for each CPU that it names, as many turns as a probe has."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = mmap.mmap(descriptor, mmap.PAGESIZE)
    for cpu in sys.stdin:
        os.sched_setaffinity(0, {int(cpu)})
        for _ in range(1 + _CHUNKS * _TURNS):
            while not line[0]:
                pass
            line[0] = 0


if __name__ == "__main__":
    main()
