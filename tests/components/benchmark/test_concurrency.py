"""The closed loop: so many clients at once, each request once, and real engines with several threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.measuring.bench import Bench
from hpml.measuring.config import BenchmarkConfig, Quiet
from hpml.measuring.process.worker import Engine
from hpml.measuring.scenarios import run_all, workload
from hpml.measuring.subjects import EngineSubject

MakeBench = Callable[..., Bench]
ANY_MACHINE = BenchmarkConfig(
    reference="fp32/onnx",
    batch_sizes=(1,),
    warmup_requests=2,
    scenarios=(),
    concurrency=(1, 3),
    quiet=Quiet(max_waited=1e6, max_stolen=1e6),
)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class Sleeper:
    """Answers in 2 ms, and notes how many requests were in it at once, and which it saw."""

    def __init__(self) -> None:
        self.most = self._inside = 0
        self.seen: Counter[int] = Counter()
        self._lock = threading.Lock()

    def predict(self, request: int) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self.seen[request] += 1
        time.sleep(2e-3)
        with self._lock:
            self._inside -= 1


@pytest.mark.parametrize("clients", [1, 3])
def test_so_many_requests_are_under_way_and_each_is_answered(
    clients: int, threads: ThreadPoolExecutor
) -> None:
    sleeper = Sleeper()
    requests = list(range(60))
    reply = workload.closed_loop(sleeper.predict, requests, clients, threads)
    assert sleeper.most == clients
    assert set(sleeper.seen) == set(requests)
    assert all(sleeper.seen[request] == 1 for request in requests[1:])  # the first one settles the clients
    assert len(reply["latency_ns"]) == 60
    assert min(reply["latency_ns"]) >= 2_000_000
    assert reply["seconds"] >= 60 * 2e-3 / clients


def test_clients_do_not_wait_for_each_other(threads: ThreadPoolExecutor) -> None:
    """Requests are answered only four at a time: with fewer clients at once, nobody would be."""
    together = threading.Barrier(4, timeout=60)

    def predict(request: int) -> None:
        if request:  # 0 settles the clients
            together.wait()

    reply = workload.closed_loop(predict, list(range(81)), 4, threads)
    assert len(reply["latency_ns"]) == 81


def test_an_engine_that_is_not_thread_safe_gets_one_request_at_a_time(
    threads: ThreadPoolExecutor,
) -> None:
    sleeper = Sleeper()
    workload.closed_loop(workload.one_at_a_time(sleeper.predict), list(range(20)), 4, threads)
    assert sleeper.most == 1


@pytest.mark.parametrize("failing", [0, 7])
def test_what_a_client_raises_is_raised_and_nobody_waits_forever(
    failing: int, threads: ThreadPoolExecutor
) -> None:
    def predict(request: int) -> None:
        if request == failing:
            raise ValueError(f"request {request}")

    with pytest.raises(ValueError, match=f"request {failing}"):
        workload.closed_loop(predict, list(range(20)), 3, threads)


def test_the_threads_of_clients_live_on_so_that_their_time_is_known_to_be_ours(
    digits_engines: dict[str, Artifact[EngineSpec]], inputs_of: Callable[[int], Path]
) -> None:
    """The watch adds up what the threads of the process did; what it misses, it takes for others' work."""
    subject = EngineSubject(folder=digits_engines["fp32/onnx"].path).model_dump(mode="json")
    engine = Engine()
    engine.load(subject, str(inputs_of(4)), [1], threads=1)
    before = set(threading.enumerate())
    engine.closed_loop(clients=3, requests=30)
    assert len(set(threading.enumerate()) - before) == 3


@pytest.mark.slow  # launches all engines; test_scenarios has closed loops, too
def test_every_engine_has_figures_for_every_number_of_clients(digits_bench: MakeBench) -> None:
    bench = digits_bench(ANY_MACHINE, "fp32/onnx", "fp32/eager")
    measured = run_all(bench)
    for scenarios, loops in measured.values():
        assert scenarios == ()
        assert [loop.clients for loop in loops] == [1, 3]
        for loop in loops:
            assert loop.requests_per_s is not None
            assert loop.latency_ms_p50 is not None
            assert loop.reason == ""
            assert 0 < loop.requests_per_s.low <= loop.requests_per_s.value <= loop.requests_per_s.high
            if loop.latency_ms_p99 is None:
                assert loop.unquoted.endswith(" of 662 samples")
            else:
                assert loop.latency_ms_p99.value >= loop.latency_ms_p50.value
            # Little's law: so many clients are in the system, less the few moments between two requests
            mean_ms_at_least = 0.5 * loop.latency_ms_p50.low
            assert loop.requests_per_s.value * mean_ms_at_least / 1e3 < loop.clients
