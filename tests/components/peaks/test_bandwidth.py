"""The kernels do what they say over the memory they say, and count the bytes that they move."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from hpml.artifacts.peaks import BandwidthPoint
from hpml.components.peaks.bandwidth import (
    ARRAYS,
    Kernel,
    ThreadTeam,
    call_of,
    largest_of_a_thread,
    probes,
)
from hpml.components.peaks.memory_levels import MemoryLevels
from hpml.components.peaks.rounds import prepare

KIB = 2**10
CPUS = sorted(os.sched_getaffinity(0))
UNTOUCHED = -7.0

kernels = pytest.mark.parametrize("kernel", list(ARRAYS))
sizes = pytest.mark.parametrize("size", [192, 8 * KIB, 24 * KIB, 100_000, 3 * 2**20])


def memory(size: int) -> np.ndarray:
    """Random numbers over `size` bytes, and after them what must not be touched."""
    floats = np.full(size // 4 + 1024, UNTOUCHED, np.float32)
    floats[: size // 4] = np.random.default_rng(0).random(size // 4)
    return floats


@kernels
@sizes
def test_a_call_computes_what_the_kernel_is_over_its_working_set_only(kernel: Kernel, size: int) -> None:
    floats = memory(size)
    before = floats.copy()
    call = call_of(kernel, floats, size)
    answer = call.work()
    length = size // (4 * ARRAYS[kernel] * 16) * 16
    assert 0.9 * size <= 4 * ARRAYS[kernel] * length <= size or size < KIB
    one, *others = (before[index * length : (index + 1) * length] for index in range(ARRAYS[kernel]))
    if kernel == "triad":
        assert np.allclose(floats[:length], others[0] + 3 * others[1])
    elif kernel == "copy":
        assert np.array_equal(floats[:length], others[0])
    else:
        dots = np.asarray(answer)
        covered = dots.shape[1] * (length // dots.shape[1])
        assert covered > 0.99 * length
        expected = float(one[:covered].astype(np.float64) @ others[0][:covered])
        assert dots.sum(axis=1) == pytest.approx(expected, rel=1e-3)
        assert np.array_equal(floats, before)
    assert np.array_equal(floats[length:], before[length:]), "only the first array is written"


@kernels
@sizes
def test_a_call_moves_many_times_its_working_set_where_that_is_small(kernel: Kernel, size: int) -> None:
    call = call_of(kernel, memory(size), size)
    passes = call.moved_bytes / size
    assert call.moved_bytes % (4 * ARRAYS[kernel]) == 0
    assert passes <= 2**11
    if 8 * KIB <= size <= 100_000:
        assert call.moved_bytes > 10e6, "else the call would cost as much as the work"


def test_numpy_lets_go_of_the_gil_in_every_dot() -> None:
    """It does from 500 dots a call on; otherwise threads would take turns."""
    for size in (8 * KIB, 512 * KIB, 20 * 2**20, 100 * 2**20):
        assert np.asarray(call_of("dot", np.ones(size // 4, np.float32), size).work()).size > 500


def test_each_thread_of_a_crew_has_a_cpu_and_aligned_memory_of_its_own() -> None:
    with closing(ThreadTeam(CPUS, 64 * KIB)) as made:
        seen: dict[int, set[int]] = {}
        tasks = [
            lambda index=index: seen.update({index: os.sched_getaffinity(0)}) for index in range(len(CPUS))
        ]
        made.seconds(tasks)
        assert seen == {index: {cpu} for index, cpu in enumerate(CPUS)}
        assert all(floats.nbytes == 64 * KIB and floats.ctypes.data % 64 == 0 for floats in made.memory)
        assert not any(np.shares_memory(made.memory[0], other) for other in made.memory[1:])
    assert os.sched_getaffinity(0) == set(CPUS), "the process itself is not pinned"


def test_a_crew_is_timed_from_the_first_start_to_the_last_end() -> None:
    with closing(ThreadTeam([CPUS[0]] * 2, KIB)) as made:
        naps = [lambda: time.sleep(0.05), lambda: time.sleep(0.15)]
        assert 0.15 <= made.seconds(naps) < 10
        assert threading.active_count() > 2
    before = threading.active_count()
    with closing(ThreadTeam([CPUS[0]] * 2, KIB)):
        pass
    assert threading.active_count() == before, "no thread is left"


def measured(made: ThreadTeam, levels: MemoryLevels, limit_bytes: int) -> dict[tuple[str, int], float | str]:
    asked = list(probes(made, levels, threads=len(made.memory), limit_bytes=limit_bytes))
    timed, reasons = prepare(asked)
    found: dict[tuple[str, int], float | str] = {}
    for index, probe in enumerate(asked):
        assert isinstance(probe.point, BandwidthPoint)
        key = probe.point.kernel, probe.point.working_set_bytes
        found[key] = reasons[index] if index in reasons else timed[index].rate()
    return found


@pytest.fixture(scope="module")
def small_machine() -> MemoryLevels:
    """Of which the largest working sets take no time; DRAM begins at 4 MiB."""
    return MemoryLevels({1: 32 * KIB, 2: 256 * KIB, 3: 2**20}, "made up")


def test_every_kernel_is_measured_with_every_working_set(small_machine: MemoryLevels) -> None:
    limit_bytes = 2**30
    with closing(ThreadTeam(CPUS[:1], largest_of_a_thread(small_machine, 1, limit_bytes))) as made:
        found = measured(made, small_machine, limit_bytes)
    assert {size for _, size in found} == set(small_machine.working_sets(1))
    assert {kernel for kernel, _ in found} == {"triad", "dot", "copy"}
    rates = [rate for rate in found.values() if isinstance(rate, float)]
    assert all(math.isfinite(rate) and 0.01 < rate < 1e5 for rate in rates)
    largest = max(small_machine.working_sets(1))
    for (_, size), rate in found.items():
        assert isinstance(rate, float) or (rate.startswith("too short: ") and size < largest)


def test_a_working_set_that_memory_has_no_room_for_is_not_measured(small_machine: MemoryLevels) -> None:
    limit_bytes = 200 * KIB
    with closing(ThreadTeam(CPUS[:1], largest_of_a_thread(small_machine, 1, limit_bytes))) as made:
        found = measured(made, small_machine, limit_bytes)
    for (_, size), rate in found.items():
        assert (size > limit_bytes) == (isinstance(rate, str) and rate.startswith("too large: "))


def test_a_call_that_costs_more_than_its_work_is_not_taken_for_bandwidth() -> None:
    """192 bytes a call: nothing can be read off that."""
    with closing(ThreadTeam(CPUS[:1], 64 * KIB)) as made:
        found = measured(made, MemoryLevels({1: 1024}, "made up"), 768)
    assert {rate for (_, size), rate in found.items() if size == 256} != set()
    for (kernel, size), rate in found.items():
        if size == 256:
            assert isinstance(rate, str) and rate.startswith("too short: "), (kernel, rate)
