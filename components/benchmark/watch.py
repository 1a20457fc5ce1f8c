"""Was the machine left to the engine while it was timed? Judged slice by slice, by the kernel's counters.

A slice is one engine's requests of one round, some tenths of a second. Five things tell of a disturbance:

waited      the engine's threads were ready to run and had to wait for a CPU (/proc/PID/task/*/schedstat),
            to the nanosecond, while others ran: its threads also wait for each other, which is its own
            matter. It is what /proc/pressure/cpu adds up for the whole machine, less our own processes, and
            without the two seconds by which that is late.
stolen      the hypervisor ran somebody else on a virtual CPU of ours (steal in /proc/stat).
others      other processes used the CPUs next to it: they take caches, memory bandwidth and frequency.
throttled   the CPU limit of our control group stopped us.
slow        matrix products of known cost, run on all CPUs at once between the slices, took longer than the
            best of the run: a lower frequency, two virtual CPUs on one core, somebody outside the machine.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import numpy as np

from components import cgroup
from components.benchmark.stage import Quiet

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_HICCUP_S = 0.002  # of waiting that any slice may have: a thread that wakes beside another one
_PROBE_SHAPE = (20, 64, 64)  # products of a size that OpenBLAS computes with one thread; about 0.1 ms
_PROBE_REPEATS = 7  # one after the other, on all CPUs at once; their median counts
_PROBE_CPUS = 16  # of a larger machine, the probe visits as many, others each time


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
        self._prober = ThreadPoolExecutor(min(len(self._cpus), _PROBE_CPUS))
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
            throttled_s=cgroup.throttled_s(),
            probe_s=probe_s,
        )

    def between(self, before: Snapshot, after: Snapshot) -> Slice:
        """What happened from one snapshot to the next."""
        wall_s = max(after.at_s - before.at_s, 1e-9)
        capacity_s = wall_s * len(self._cpus)
        ours_s = after.engine_s - before.engine_s + after.own_s - before.own_s
        others_s = after.busy_s - before.busy_s - ours_s
        return Slice(
            waited=max(0.0, after.waited_s - before.waited_s - _HICCUP_S) / wall_s,
            stolen=_beyond_a_tick(after.stolen_s - before.stolen_s) / wall_s,
            others=_beyond_a_tick(others_s, ticks=self._tick_error(capacity_s)) / capacity_s,
            throttled=(after.throttled_s - before.throttled_s) / wall_s,
            probe_s={
                cpu: max(snapshot.probe_s[cpu] for snapshot in (before, after) if cpu in snapshot.probe_s)
                for cpu in before.probe_s.keys() | after.probe_s.keys()
            },
        )

    def _tick_error(self, capacity_s: float) -> float:
        """By how many ticks the CPU time of all may be off: /proc/stat samples who runs, once a tick."""
        return max(len(self._cpus), 1 + 0.7 * math.sqrt(capacity_s / _TICK_S))

    def disturbances(self, seen: Slice) -> list[str]:
        """Why the slice does not count, by the best probe so far; empty if it does."""
        limits = self.limits
        found = []
        if seen.waited > limits.max_waited and seen.others > 0:
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

    def is_fast(self, snapshot: Snapshot) -> bool:
        """Whether the probe of a snapshot is within the limit."""
        return self._slowdown(snapshot.probe_s) <= self.limits.max_slowdown

    def slowdown(self, seen: Slice) -> float:
        """How much longer the probe took than at its best, on the worst CPU; 0.1 is 10 %."""
        return self._slowdown(seen.probe_s)

    def _slowdown(self, probe_s: dict[int, float]) -> float:
        return max((took / self.best_probe_s[cpu] for cpu, took in probe_s.items()), default=1.0) - 1

    def drop(self, causes: Iterable[str]) -> None:
        """Count a slice that does not count."""
        self.dropped += 1
        self.causes.update(causes)

    def _probe(self) -> dict[int, float]:
        """Seconds of a matrix product on each CPU (on some of them, where there are many), all at once.

        At once, because virtual CPUs that share a core are slow only together.
        """
        turn = [self._cpus[(self._turn + step) % len(self._cpus)] for step in range(_PROBE_CPUS)]
        self._turn += _PROBE_CPUS
        cpus = list(dict.fromkeys(turn))
        together = Barrier(len(cpus))
        took = dict(zip(cpus, self._prober.map(lambda cpu: _product_s(cpu, together), cpus), strict=True))
        for cpu, seconds in took.items():
            self.best_probe_s[cpu] = min(seconds, self.best_probe_s.get(cpu, seconds))
        return took


def _product_s(cpu: int, together: Barrier) -> float:
    """Seconds of a product on `cpu`; this thread is pinned to it from now on."""
    os.sched_setaffinity(0, {cpu})
    matrices = np.ones(_PROBE_SHAPE, np.float32)
    products = np.matmul(matrices, matrices)  # the first one pages the memory in
    together.wait()
    stamps = [time.perf_counter()]
    for _ in range(_PROBE_REPEATS):
        np.matmul(matrices, matrices, out=products)
        stamps.append(time.perf_counter())
    return float(np.median(np.diff(stamps)))


def _beyond_a_tick(seconds: float, *, ticks: float = 1.0) -> float:
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
