"""Was an engine disturbed while it was timed? Judged by what its own threads waited for a CPU.

What makes figures wrong on a busy machine shows as run-queue delay: a thread is ready to run, and another
process has its CPU (hpml/measuring/machine/run_queue.py). Besides, the hypervisor may run somebody else on a
virtual CPU of ours (steal in /proc/stat), and a CPU limit may stop our control group. What other CPUs of the
machine are doing does not count.

A thread that wakes up on an idle CPU waits, too, some tens of microseconds: that is its own matter.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.core import cgroup
from hpml.measuring.config import Quiet
from hpml.measuring.machine.run_queue import Reading, RunQueue, Waited, schedstat_available

WAITED = "its threads waited for a CPU"
STOLEN = "the hypervisor gave the CPU to another machine"
THROTTLED = "the control group's CPU limit stopped the engine"
UNSEEN = "this kernel does not tell how long threads wait for a CPU (/proc/self/schedstat)"

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_WAKE_UP_NS = 100_000  # that a thread may wait each time it gets a CPU
SETTLING_NS = 5_000_000  # an engine of 20 us reaches its speed after some 20 requests, a slow one at once
_WINDOW = 1.1  # times the median request
_ALL_THE_TIME_NS = 20_000  # a thread that lacks no more of the time between two readings ran for all of it


@dataclass(frozen=True)
class Snapshot:
    """The kernel's counters at one moment. busy, stolen: of the CPUs that we may use."""

    at_s: float
    waited: Waited  # of the engine's threads
    ran_s: float  # CPU time of the engine's threads and of this process
    busy_s: float
    stolen_s: float
    throttled_s: float


@dataclass(frozen=True)
class Slice:
    """What was lost from one snapshot to the next, as shares of the time between them."""

    waited: float
    others: float  # that other processes had of all CPUs
    stolen: float
    throttled: float


class Watch:
    """Reads the counters, judges, and counts what was judged."""

    def __init__(self, limits: Quiet) -> None:
        self.limits = limits
        self._cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        self.causes: Counter[str] = Counter()
        self.slices = 0
        self.dropped = 0
        self.unseen = "" if schedstat_available() else UNSEEN

    def snapshot(self, pid: int | None = None) -> Snapshot:
        """The counters now. pid: the engine's process; none where what is timed is in this one."""
        with RunQueue(pid) as queue:
            waited = queue.total()
        busy_s, stolen_s = _cpu_seconds(self._cpus)
        return Snapshot(
            at_s=time.perf_counter(),
            waited=waited,
            ran_s=time.process_time() + (waited.ran_ns / 1e9 if pid else 0.0),
            busy_s=busy_s,
            stolen_s=stolen_s,
            throttled_s=cgroup.throttled_s(),
        )

    def between(self, before: Snapshot, after: Snapshot) -> Slice:
        """What happened from one snapshot to the next."""
        wall_s = max(after.at_s - before.at_s, 1e-9)
        capacity_s = wall_s * len(self._cpus)
        others_s = after.busy_s - before.busy_s - (after.ran_s - before.ran_s)
        # The counters move in ticks: one more or less is nothing, and who runs is sampled once a tick.
        others_s = max(0.0, others_s - _TICK_S * max(len(self._cpus), 1 + math.sqrt(capacity_s / _TICK_S)))
        stolen_s = max(0.0, after.stolen_s - before.stolen_s - _TICK_S)
        return Slice(
            waited=waited_for_others_ns(after.waited.since(before.waited)) / 1e9 / wall_s,
            others=others_s / capacity_s,
            stolen=stolen_s / wall_s,
            throttled=(after.throttled_s - before.throttled_s) / wall_s,
        )

    def disturbances(self, seen: Slice, *, oversubscribed: bool = False) -> list[str]:
        """Why what was timed meanwhile does not count; empty if it does.

        oversubscribed: the engine has more threads at work than there are CPUs. They wait for each other,
        which is its own matter, so it counts only where others had the CPUs, too.
        """
        waited = seen.waited > self.limits.max_waited
        by_others = not oversubscribed or seen.others > self.limits.max_waited
        return [WAITED] * (waited and by_others) + self.disturbances_outside(seen)

    def disturbances_outside(self, seen: Slice) -> list[str]:
        """Those that do not show in the run queues of the engine's threads."""
        happened = {STOLEN: seen.stolen > self.limits.max_stolen, THROTTLED: seen.throttled > 0}
        return [cause for cause, has_happened in happened.items() if has_happened]

    def count(self, slices: int, causes: Sequence[str]) -> None:
        """Count slices that were timed; they do not count where there are causes."""
        self.slices += slices
        if causes:
            self.dropped += slices
            self.causes.update(dict.fromkeys(causes, slices))


def waited_for_others_ns(waited: Waited) -> int:
    """What is left of waiting without what waking up takes."""
    return max(0, waited.waited_ns - _WAKE_UP_NS * waited.switches)


def undisturbed(
    started_ns: NDArray[np.int64],
    finished_ns: NDArray[np.int64],
    readings: Sequence[Reading],
    *,
    max_waited: float,
) -> NDArray[np.bool_]:
    """Which requests met no thread of their process that waited, (requests,), nor what that leaves behind.

    A CPU that another process had has its data in the caches: the engine settles again before a request
    counts. And a request counts if nobody waited from its start until a tenth longer than most requests take,
    even if it was shorter: of what bursts leave between them, long requests fit less often than short ones,
    and what happened to fit would be too fast.

    max_waited: as a share of the time between two readings, what is let pass. readings: ascending, around and
    between the requests.
    """
    threads = set.intersection(*(set(waited) for _, waited in readings))
    waits = [
        wait
        for thread in threads
        for wait in _waits([(at_ns, waited[thread]) for at_ns, waited in readings], max_waited)
    ]

    def clean(until_ns: NDArray[Any]) -> NDArray[np.bool_]:
        met = [(until_ns > from_ns) & (started_ns < to_ns + SETTLING_NS) for from_ns, to_ns in waits]
        return ~np.any(met, axis=0) if met else np.ones(len(started_ns), bool)

    fitting = clean(finished_ns)
    if not fitting.any():
        return fitting
    window_ns = _WINDOW * np.median((finished_ns - started_ns)[fitting])
    until_ns = np.minimum(started_ns + window_ns, finished_ns[-1])  # after the last no request is disturbed
    return clean(np.maximum(finished_ns, until_ns))


def _waits(readings: Sequence[tuple[int, Waited]], max_waited: float) -> Iterator[tuple[int, int]]:
    """When a thread may have waited: from, to.

    A wait is told when it is over. One of W that is told between two readings can have begun W before the
    first of them, but not before the thread last ran for all of the time between two readings.
    """
    steps = [
        (before_ns, after_ns, after.since(before))
        for (before_ns, before), (after_ns, after) in itertools.pairwise(readings)
    ]
    for index, (before_ns, after_ns, told) in enumerate(steps):
        waited_ns = waited_for_others_ns(told)
        if waited_ns > max_waited * (after_ns - before_ns):
            ran_until_ns = [end for begin, end, step in steps[:index] if _ran(end - begin, step)]
            yield max(before_ns - waited_ns, *ran_until_ns[-1:], 0), after_ns


def _ran(took_ns: int, step: Waited) -> bool:
    return abs(took_ns - step.ran_ns) < _ALL_THE_TIME_NS  # the kernel may book some of it late


def _cpu_seconds(cpus: set[str]) -> tuple[float, float]:
    """Seconds that these CPUs were busy, and stolen, since boot."""
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy * _TICK_S, stolen * _TICK_S
