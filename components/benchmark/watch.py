"""Was the machine left to the engine while it was timed? Judged slice by slice, by the kernel's counters.

A slice is one engine's requests of one round, some tenths of a second. Five things tell of a disturbance:

waited      the engine's threads were ready to run and had to wait for a CPU (/proc/PID/task/*/schedstat):
            what another process took from it, to the nanosecond, in the engine's own name. It is what
            /proc/pressure/cpu adds up for the whole machine, less our own processes, and without the two
            seconds by which that is late.
stolen      the hypervisor ran somebody else on a virtual CPU of ours (steal in /proc/stat).
others      other processes used the CPUs next to it: they take caches, memory bandwidth and frequency.
throttled   the CPU limit of our control group stopped us.
slow        a matrix product of known cost, run on each CPU between the slices, took longer than the best of
            the run: a lower frequency, a busy sibling, somebody outside the virtual machine.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.benchmark.stage import Quiet

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROBE_SIZE = 64  # the largest product that OpenBLAS computes with one thread: 64 ** 3 multiply-accumulates
_PROBE_PRODUCTS = 60  # about 0.5 ms
_PROBE_REPEATS = 3
_PROBE_CPUS = 8  # of a large machine, the probe visits as many, others each time


@dataclass(frozen=True)
class Snapshot:
    """The kernel's counters at one moment, in seconds. busy and stolen: of the CPUs that we may use."""

    at_s: float
    waited_s: float  # of the engine's threads
    engine_s: float  # CPU time of the engine's threads
    own_s: float  # CPU time of this process
    busy_s: float
    stolen_s: float
    throttled_s: float
    probe_s: dict[int, float]  # CPU -> seconds of one matrix product


@dataclass(frozen=True)
class Slice:
    """How one slice went: shares of its time, and the probe at its edges."""

    waited: float
    stolen: float
    others: float
    throttled: float
    probe_s: dict[int, float]  # the slower one of before and after


class Watch:
    """Reads the counters and judges slices. Make one where nothing is timed yet: it finds the best probe."""

    def __init__(self, limits: Quiet) -> None:
        self.limits = limits
        self._cpus = sorted(os.sched_getaffinity(0))
        self._turn = 0
        self._a, self._out = (np.ones((_PROBE_SIZE, _PROBE_SIZE), np.float32) for _ in range(2))
        self.best_probe_s: dict[int, float] = {}
        self.causes: Counter[str] = Counter()
        self.slices = 0
        self.dropped = 0
        for _ in range(5):
            self._probe()

    def snapshot(self, pid: int) -> Snapshot:
        """The counters now; `pid` is the engine's process. Takes some milliseconds, most of it the probe."""
        probe_s = self._probe()
        busy_s, stolen_s = _cpu_seconds(self._cpus)
        waited_s, engine_s = _scheduled(pid)
        return Snapshot(
            at_s=time.perf_counter(),
            waited_s=waited_s,
            engine_s=engine_s,
            own_s=time.process_time(),
            busy_s=busy_s,
            stolen_s=stolen_s,
            throttled_s=_throttled_s(),
            probe_s=probe_s,
        )

    def between(self, before: Snapshot, after: Snapshot) -> Slice:
        """What happened from one snapshot to the next."""
        wall_s = max(after.at_s - before.at_s, 1e-9)
        capacity_s = wall_s * len(self._cpus)
        ours_s = after.engine_s - before.engine_s + after.own_s - before.own_s
        others_s = after.busy_s - before.busy_s - ours_s
        return Slice(
            waited=(after.waited_s - before.waited_s) / wall_s,
            stolen=_beyond_a_tick(after.stolen_s - before.stolen_s) / wall_s,
            others=_beyond_a_tick(others_s, ticks=2 * len(self._cpus)) / capacity_s,
            throttled=(after.throttled_s - before.throttled_s) / wall_s,
            probe_s={
                cpu: max(snapshot.probe_s[cpu] for snapshot in (before, after) if cpu in snapshot.probe_s)
                for cpu in before.probe_s.keys() | after.probe_s.keys()
            },
        )

    def disturbances(self, seen: Slice) -> list[str]:
        """Why the slice does not count, by the best probe so far; empty if it does."""
        limits = self.limits
        found = []
        if seen.waited > limits.max_waited:
            found.append("other processes took the CPU from the engine")
        if seen.stolen > limits.max_stolen:
            found.append("the hypervisor gave the CPU to another machine")
        if seen.others > limits.max_others:
            found.append("other processes kept the CPUs busy")
        if seen.throttled > 0:
            found.append("the control group's CPU limit stopped the engine")
        if self.slowdown(seen) > limits.max_slowdown:
            found.append("the CPU was slower than at its best")
        return found

    def slowdown(self, seen: Slice) -> float:
        """How much longer the probe took than at its best, on the worst CPU; 0.1 is 10 %."""
        return max((took / self.best_probe_s[cpu] for cpu, took in seen.probe_s.items()), default=1.0) - 1

    def drop(self, causes: Iterable[str]) -> None:
        """Count a slice that does not count."""
        self.dropped += 1
        self.causes.update(causes)

    def _probe(self) -> dict[int, float]:
        """Seconds of a matrix product on each CPU (on some of them, where there are many), pinned to it."""
        allowed = os.sched_getaffinity(0)
        turn = [self._cpus[(self._turn + step) % len(self._cpus)] for step in range(_PROBE_CPUS)]
        self._turn += _PROBE_CPUS
        took: dict[int, float] = {}
        try:
            for cpu in dict.fromkeys(turn):
                os.sched_setaffinity(0, {cpu})
                took[cpu] = float(np.median([self._products_s() for _ in range(_PROBE_REPEATS)]))
                self.best_probe_s[cpu] = min(took[cpu], self.best_probe_s.get(cpu, took[cpu]))
        finally:
            os.sched_setaffinity(0, allowed)
        return took

    def _products_s(self) -> float:
        begun_s = time.perf_counter()
        for _ in range(_PROBE_PRODUCTS):
            np.matmul(self._a, self._a, out=self._out)
        return time.perf_counter() - begun_s


def _beyond_a_tick(seconds: float, *, ticks: int = 1) -> float:
    """Counters in ticks are off by one at either end; what is within that is nothing."""
    return max(0.0, seconds - ticks * _TICK_S)


def _cpu_seconds(cpus: list[int]) -> tuple[float, float]:
    """Seconds that these CPUs were busy and stolen since boot."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy * _TICK_S, stolen * _TICK_S


def _scheduled(pid: int) -> tuple[float, float]:
    """Seconds that the threads of a process waited for a CPU, and ran, since each began."""
    waited_ns = ran_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except OSError:  # the thread has just ended, or the kernel does not tell
            continue
        ran_ns += int(ran)
        waited_ns += int(waited)
    return waited_ns / 1e9, ran_ns / 1e9


def _throttled_s() -> float:
    """Seconds that our control group was stopped by its CPU limit; 0 where there is none."""
    for file, key, unit_s in (
        ("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e-6),
        ("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e-9),
    ):
        try:
            fields = dict(line.split() for line in Path(file).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(fields.get(key, 0)) * unit_s
    return 0.0
