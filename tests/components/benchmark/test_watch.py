"""What the watch sees of a disturbance, in the counters and of processes that really compute."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hpml.core.hardware import usable_cpus
from hpml.measuring.config import Quiet
from hpml.measuring.machine.run_queue import Reading, RunQueue, Waited
from hpml.measuring.machine.watch import STOLEN, THROTTLED, WAITED, Snapshot, Watch, undisturbed

CPUS = len(os.sched_getaffinity(0))
QUIET = Snapshot(
    at_s=100.0, waited=Waited(10**9, 5, 0), ran_s=7.0, busy_s=50.0, stolen_s=3.0, throttled_s=0.0
)


@pytest.fixture
def watch() -> Watch:
    return Watch(Quiet())


def later(**changes: object) -> Snapshot:
    """One second after QUIET, in which the engine computed with one thread and nothing else did."""
    engine = {"at_s": 101.0, "ran_s": 8.0, "busy_s": 51.0}
    return dataclasses.replace(QUIET, **{**engine, **changes})  # type: ignore[arg-type]


def test_an_engine_alone_is_not_disturbed(watch: Watch) -> None:
    assert watch.disturbances(watch.between(QUIET, later())) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"waited": Waited(10**9 + 30_000_000, 15, 0)}, WAITED),
        ({"stolen_s": 3.04}, STOLEN),
        ({"throttled_s": 0.001}, THROTTLED),
    ],
)
def test_each_disturbance_has_its_name(watch: Watch, changes: dict[str, object], cause: str) -> None:
    assert watch.disturbances(watch.between(QUIET, later(**changes))) == [cause]


@pytest.mark.parametrize(
    "changes",
    [
        {"waited": Waited(10**9 + 15_000_000, 6, 0)},
        {"waited": Waited(10**9 + 90_000_000, 1005, 0)},  # a thousand threads that woke up
        {"stolen_s": 3.01},  # within a tick of the counter
        {"busy_s": 51.0 + CPUS},  # other CPUs are not the engine's matter
    ],
)
def test_what_is_within_the_limits_is_let_pass(watch: Watch, changes: dict[str, object]) -> None:
    assert watch.disturbances(watch.between(QUIET, later(**changes))) == []


def test_threads_that_wait_for_each_other_are_their_own_matter(watch: Watch) -> None:
    waited = Waited(10**9 + 500_000_000, 10, 0)
    alone = watch.between(QUIET, later(waited=waited))
    beside = watch.between(QUIET, later(waited=waited, busy_s=51.0 + 0.5 * CPUS))
    assert watch.disturbances(alone) == [WAITED]
    assert watch.disturbances(alone, oversubscribed=True) == []
    assert watch.disturbances(beside, oversubscribed=True) == [WAITED]


def test_only_what_was_disturbed_is_counted_as_dropped(watch: Watch) -> None:
    watch.count(5, [])
    watch.count(5, [WAITED, STOLEN])
    assert (watch.slices, watch.dropped, watch.causes) == (10, 5, {WAITED: 5, STOLEN: 5})


# -------------------------------------------------------------------------------------- request by request

MS = 1_000_000
STARTED_NS = np.arange(20) * MS  # a request a millisecond
FINISHED_NS = STARTED_NS + MS


def readings(*rows: tuple[int, int, int], ran: float = 0.0) -> list[Reading]:
    """Of one thread: when, what it had waited, how often it had got a CPU; what share of its time it ran."""
    return [
        (at_ns, {7: Waited(waited_ns, switches, round(ran * at_ns))}) for at_ns, waited_ns, switches in rows
    ]


def test_without_waiting_every_request_counts() -> None:
    two_wake_ups = readings((0, 7, 1), (10 * MS, 7, 1), (20 * MS, 90_000, 3))
    assert undisturbed(STARTED_NS, FINISHED_NS, two_wake_ups, max_waited=0.02).all()


def test_requests_since_a_thread_may_have_begun_to_wait_do_not_count() -> None:
    told = readings((0, 0, 0), (10 * MS, 0, 0), (12 * MS, 4 * MS, 1), (20 * MS, 4 * MS, 1))
    clean = undisturbed(STARTED_NS, FINISHED_NS, told, max_waited=0.02)
    assert list(np.flatnonzero(~clean)) == list(range(6, 12 + 5))  # from 5 ms later it has settled


def test_a_thread_that_ran_all_the_time_had_not_begun_to_wait() -> None:
    told = readings((0, 0, 0), (10 * MS, 0, 0), (12 * MS, 4 * MS, 1), (20 * MS, 4 * MS, 1), ran=1.0)
    clean = undisturbed(STARTED_NS, FINISHED_NS, told, max_waited=0.02)
    assert list(np.flatnonzero(~clean)) == list(range(9, 12 + 5))  # 9 had no time to be a long one


def test_each_thread_waits_for_itself() -> None:
    told: list[Reading] = [
        (at_ns, {7: Waited(waited_ns, 1, at_ns), 8: Waited(waited_ns, 1, at_ns - waited_ns)})
        for at_ns, waited_ns in ((0, 0), (10 * MS, 0), (12 * MS, 2 * MS), (20 * MS, 2 * MS))
    ]
    clean = undisturbed(STARTED_NS, FINISHED_NS, told, max_waited=0.02)
    assert list(np.flatnonzero(~clean)) == list(range(9, 12 + 5))  # 9 had no time to be a long one


def test_a_wait_that_was_told_only_after_the_last_request_counts() -> None:
    told = readings((0, 0, 0), (20 * MS, 0, 0), (21 * MS, 3 * MS, 1))
    clean = undisturbed(STARTED_NS, FINISHED_NS, told, max_waited=0.02)
    assert list(np.flatnonzero(~clean)) == [17, 18, 19]


# ---------------------------------------------------------------------------------------- real processes


@contextmanager
def computing(processes: int) -> Iterator[list[int]]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.alone
def test_processes_that_compute_are_seen_by_an_engine_that_computes_too() -> None:
    watch = Watch(Quiet())
    with computing(3 * usable_cpus()) as (engine, *_):  # one of them stands for the engine
        time.sleep(0.5)
        before = watch.snapshot(engine)
        time.sleep(1.0)
        seen = watch.between(before, watch.snapshot(engine))
    assert seen.waited > 0.2  # it had about a third of a CPU
    assert seen.others > 0.3
    assert WAITED in watch.disturbances(seen)


def test_a_sleeping_engine_waits_for_nothing() -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    try:
        sleeper.stdout.readline()
        with RunQueue(sleeper.pid) as queue:
            for _ in range(100):  # it may still be on its way to sleep
                before = queue.read()
                time.sleep(0.05)
                if queue.read() == before:
                    break
            assert queue.read() == before
    finally:
        sleeper.kill()
        sleeper.communicate()


def test_the_threads_of_a_process_that_ended_are_read_as_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    with RunQueue(ended.pid) as queue:
        ended.wait()
        assert queue.total() == Waited(0, 0, 0)
    with RunQueue(ended.pid) as gone:
        assert gone.total() == Waited(0, 0, 0)
