"""Memory bandwidth by working set: STREAM's triad and copy through torch, the dot product through BLAS.

McCalpin (1995), "Memory Bandwidth and Machine Balance in Current High Performance Computers". As many threads
as are asked for, each pinned to a CPU of its own, with memory of its own that it touched first; the time is
that from the first one's start to the last one's end, the bytes are those of all.

A loop over 24 KiB takes 0.2 us, and calling a library takes 1 us. So one call goes many times over the same
memory. For the dot product the inputs are broadcast along a first axis, and each of its rows is one `dot` of
BLAS. For torch, which refuses to write to broadcast memory, the rows are views that lie one cache line
further each: axes of size 2 whose stride is a line, so that 10 axes make 1,024 rows and the memory is 10
lines longer than a row, which the working set counts. The rows overlap, yet each element gets the same value
from all of them. What is left of the call is measured, and a point of which it would be more than a
twentieth is not given.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpml.artifacts.peaks import BandwidthPoint
from hpml.components.peaks.memory_levels import MemoryLevels
from hpml.components.peaks.rounds import NotMeasurable, Probe, Timed

Kernel = Literal["triad", "dot", "copy"]
Memory = NDArray[np.float32]
Work = Callable[[], object]

ARRAYS: dict[Kernel, int] = {"triad": 3, "dot": 2, "copy": 2}  # each is read or written once a pass

_LINE = 16  # floats in a cache line of 64 bytes
_PAGE_BYTES = 4096
_CALL_BYTES = 32e6  # to be moved by one call
_MOST_DOUBLINGS = 11  # of the rows of a call
_DOT_FLOATS = 2048  # of one `dot` at most: numpy lets go of the GIL from 500 of them a call on
_GO_S = 0.002  # one go takes at least; threads start within some 20 us of each other
_MOST_OVERHEAD = 0.05  # of a call's time


@dataclass(frozen=True)
class Call:
    """One call of a library, and the bytes that it moves."""

    work: Work
    moved_bytes: int


def call_of(kernel: Kernel, memory: Memory, working_set_bytes: int) -> Call:
    """A call that goes over the first `working_set_bytes` of `memory` with `kernel`, again and again."""
    length = working_set_bytes // (4 * ARRAYS[kernel] * _LINE) * _LINE
    arrays = [memory[index * length : (index + 1) * length] for index in range(ARRAYS[kernel])]
    doublings = int(math.log2(max(1.0, _CALL_BYTES / working_set_bytes)))
    doublings = min(doublings, _MOST_DOUBLINGS, length // _LINE - 1)  # a row has a line at least
    if kernel == "dot":
        return _dot(arrays[0], arrays[1], rows=2**doublings)
    views = [_overlapping_rows(array, doublings) for array in arrays]
    moved_bytes = 4 * sum(view.numel() for view in views)
    if kernel == "copy":
        target, source = views
        return Call(lambda: target.copy_(source), moved_bytes)
    total, one, other = views
    return Call(lambda: torch.add(one, other, alpha=3.0, out=total), moved_bytes)


def _overlapping_rows(array: Memory, doublings: int) -> torch.Tensor:
    """2 ** `doublings` rows over nearly all of `array`, as axes of size 2 before the last."""
    row = len(array) - doublings * _LINE
    strides = (_LINE,) * doublings + (1,)
    return torch.from_numpy(array).as_strided((2,) * doublings + (row,), strides)


def _dot(one: Memory, other: Memory, *, rows: int) -> Call:
    dots = math.ceil(len(one) / _DOT_FLOATS)
    floats = len(one) // dots
    shape = (rows, dots, floats)
    left, right = (
        np.broadcast_to(array[: dots * floats].reshape(dots, floats), shape) for array in (one, other)
    )
    answers = np.empty((rows, dots), np.float32)
    return Call(lambda: np.vecdot(left, right, out=answers), 2 * 4 * rows * dots * floats)


# --------------------------------------------------------------------------------------------------- threads


class ThreadTeam:
    """Threads that work side by side, each pinned to its own CPU, with `memory` that it touched first.

    memory_bytes: that each of them has.
    """

    def __init__(self, cpus: Sequence[int], memory_bytes: int) -> None:
        self._threads = [ThreadPoolExecutor(1, initializer=_pin, initargs=(cpu,)) for cpu in cpus]
        touched = [thread.submit(_touched, memory_bytes) for thread in self._threads]
        self.memory = [future.result() for future in touched]

    def seconds(self, tasks: Sequence[Work]) -> float:
        """Each thread does its task, all at once: from the start of the first to the end of the last."""
        together = Barrier(len(tasks))

        def timed(task: Work) -> tuple[float, float]:
            together.wait()
            begun_s = time.perf_counter()
            task()
            return begun_s, time.perf_counter()

        futures = [thread.submit(timed, task) for thread, task in zip(self._threads, tasks, strict=True)]
        begun_s, ended_s = zip(*(future.result() for future in futures), strict=True)
        return float(max(ended_s) - min(begun_s))

    def close(self) -> None:
        """End the threads and let go of the memory."""
        for thread in self._threads:
            thread.shutdown()
        self.memory.clear()


def _pin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})  # 0: of this thread
    torch.set_num_threads(1)  # likewise


def _touched(size_bytes: int) -> Memory:
    """Ones that begin with a cache line; numpy asks Linux for huge pages where they are many."""
    floats = np.ones(size_bytes // 4 + _LINE, np.float32)
    aligned = -floats.ctypes.data % 64 // 4
    return floats[aligned : aligned + size_bytes // 4]


# ---------------------------------------------------------------------------------------------------- probes


def largest_of_a_thread(levels: MemoryLevels, threads: int, limit_bytes: int) -> int:
    """The largest working set of one of `threads`, of those that fit into `limit_bytes`; a page at least."""
    fitting = [size // threads for size in levels.working_sets(threads) if size <= limit_bytes]
    return max(_PAGE_BYTES, *fitting)


def probes(team: ThreadTeam, levels: MemoryLevels, *, threads: int, limit_bytes: int) -> Iterator[Probe]:
    """The probes of `threads` together: every kernel with every working set.

    A working set beyond `limit_bytes` is not measurable. The team has memory for all others.
    """
    overhead_s = {kernel: _overhead_s(team, kernel) for kernel in ARRAYS}
    for size in levels.working_sets(threads):
        for kernel in ARRAYS:
            point = BandwidthPoint(
                device="cpu",
                kernel=kernel,
                threads=threads,
                working_set_bytes=size,
                level=levels.level(size),
            )
            yield Probe(point, lambda point=point: _prepare(point, team, overhead_s, limit_bytes))  # type: ignore[misc]


def _prepare(
    point: BandwidthPoint, team: ThreadTeam, overhead_s: dict[Kernel, float], limit_bytes: int
) -> Timed:
    if point.working_set_bytes > limit_bytes:
        needed_mb, limit_mb = point.working_set_bytes / 1e6, limit_bytes / 1e6
        raise NotMeasurable(f"too large: {needed_mb:,.0f} MB, of which {limit_mb:,.0f} MB may be used")
    calls = [
        call_of(point.kernel, memory, point.working_set_bytes // point.threads) for memory in team.memory
    ]
    call_s = min(team.seconds([call.work for call in calls]) for _ in range(3))
    share = overhead_s[point.kernel] / call_s
    if share > _MOST_OVERHEAD:
        raise NotMeasurable(f"too short: calling the library is {100 * share:.0f} % of the time")
    repeats = math.ceil(_GO_S / call_s)
    tasks = [_repeated(call.work, repeats) for call in calls]
    return Timed(lambda: team.seconds(tasks), repeats * sum(call.moved_bytes for call in calls))


def _overhead_s(team: ThreadTeam, kernel: Kernel) -> float:
    """The seconds of a call that does next to nothing, in the team's first thread."""
    repeats = 100
    call = call_of(kernel, team.memory[0][: ARRAYS[kernel] * _LINE], ARRAYS[kernel] * _LINE * 4)
    alone = [_repeated(call.work, repeats), *(_repeated(call.work, 0) for _ in team.memory[1:])]
    return min(team.seconds(alone) for _ in range(5)) / repeats


def _repeated(work: Work, times: int) -> Work:
    def repeated() -> None:
        for _ in range(times):
            work()

    return repeated
