"""What the watch sees of a disturbance, in the counters and of processes that really compute."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from components.benchmark.stage import Quiet
from components.benchmark.watch import Snapshot, Watch
from components.hardware import usable_cpus

CPUS = len(os.sched_getaffinity(0))
QUIET = Snapshot(
    at_s=100.0,
    waited_s=1.0,
    engine_s=5.0,
    own_s=2.0,
    busy_s=50.0,
    stolen_s=3.0,
    throttled_s=0.0,
    probe_s={0: 1e-3},
)


@pytest.fixture
def watch() -> Watch:
    made = Watch(Quiet())
    made.best_probe_s = {0: 1e-3}
    return made


def later(**changes: float | dict[int, float]) -> Snapshot:
    """One second after QUIET, in which the engine computed with one thread and nothing else did."""
    engine = {"at_s": 101.0, "engine_s": 6.0, "busy_s": 51.0}
    return dataclasses.replace(QUIET, **{**engine, **changes})  # type: ignore[arg-type]


def test_an_engine_alone_is_not_disturbed(watch: Watch) -> None:
    assert watch.disturbances(watch.between(QUIET, later())) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"waited_s": 1.06, "busy_s": 51.3 + 0.01 * CPUS}, "took the CPU from the engine"),
        ({"stolen_s": 3.04}, "the hypervisor"),
        ({"busy_s": 51.2 + 0.3 * CPUS}, "kept the CPUs busy"),
        ({"throttled_s": 0.001}, "CPU limit"),
        ({"probe_s": {0: 1.25e-3}}, "slower than at its best"),
    ],
)
def test_each_disturbance_has_its_name(watch: Watch, changes: dict[str, float], cause: str) -> None:
    causes = watch.disturbances(watch.between(QUIET, later(**changes)))
    assert len(causes) == 1
    assert cause in causes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"waited_s": 1.05},  # with what a hiccup takes
        {"stolen_s": 3.01},  # within a tick of the counter
        {"waited_s": 1.7},  # for a thread of its own: nobody else ran
        {"busy_s": 51.0 + 0.2 * CPUS},
        {"own_s": 3.0, "busy_s": 52.0},  # the stage itself
        {"probe_s": {0: 1.1e-3}},
    ],
)
def test_what_is_within_the_limits_is_let_pass(watch: Watch, changes: dict[str, float]) -> None:
    assert watch.disturbances(watch.between(QUIET, later(**changes))) == []


def test_a_slice_is_judged_by_the_best_probe_whenever_that_came(watch: Watch) -> None:
    seen = watch.between(QUIET, later())
    assert watch.slowdown(seen) == pytest.approx(0)
    watch.best_probe_s[0] = 0.8e-3
    assert watch.slowdown(seen) == pytest.approx(0.25)
    assert watch.disturbances(seen) == ["the CPU was slower than at its best"]


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
    causes = watch.disturbances(seen)
    assert "other processes took the CPU from the engine" in causes
    assert "other processes kept the CPUs busy" in causes


def test_a_sleeping_engine_waits_for_nothing_and_the_affinity_is_kept() -> None:
    watch = Watch(Quiet())
    allowed = os.sched_getaffinity(0)
    code = "import time; print(flush=True); time.sleep(60)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    try:
        sleeper.stdout.readline()
        while not _sleeps(sleeper.pid):
            time.sleep(0.01)
        before = watch.snapshot(sleeper.pid)
        time.sleep(0.3)
        seen = watch.between(before, watch.snapshot(sleeper.pid))
    finally:
        sleeper.kill()
        sleeper.wait()
        sleeper.stdout.close()
    assert seen.waited == 0
    assert os.sched_getaffinity(0) == allowed
    assert set(seen.probe_s) <= allowed
    assert all(took > 0 for took in seen.probe_s.values())


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
