"""Requests that do not come one by one: Poisson arrivals, clients at once. Runs in the engine's process."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

_SETTLING_NS = 20_000_000
_SPIN_NS = 200_000  # sleep ends late by up to so much
_LEAD_NS = 1_000_000  # from the call to the first scheduled moment

Predict = Callable[[Any], Any]


def by_arrival(
    predict: Predict,
    requests: Sequence[Any],
    arrivals_ns: Sequence[int],
    *,
    bound_ns: int,
    allowed: int,
) -> dict[str, Any]:
    """Answer `requests` in order, none before its arrival; arrivals are counted from the first moment.

    Answers the nanoseconds from each arrival to its answer, and stops after the request with which more than
    `allowed` took longer than `bound_ns`. While it waits for an arrival the engine has nothing to do, so
    spinning takes nothing from it.
    """
    clock = time.perf_counter_ns
    latency_ns = array("q", bytes(8 * len(requests)))
    late = answered = 0
    settle(predict, requests[0])
    first_ns = clock() + _LEAD_NS
    for request, arrival_ns in zip(requests, arrivals_ns, strict=True):
        due_ns = first_ns + arrival_ns
        pause_ns = due_ns - clock()
        if pause_ns > _SPIN_NS:
            time.sleep((pause_ns - _SPIN_NS) / 1e9)
        while clock() < due_ns:
            pass
        predict(request)
        latency_ns[answered] = took_ns = clock() - due_ns
        answered += 1
        if took_ns > bound_ns:
            late += 1
            if late > allowed:
                break
    return {"latency_ns": latency_ns[:answered].tolist()}


def poisson_ns(requests: int, per_s: float, *, seed: int) -> list[int]:
    """Nanoseconds at which requests arrive in a Poisson process; at every rate the same but for the scale."""
    gaps = np.random.default_rng(seed).exponential(1.0, requests)
    arrivals_ns: list[int] = (gaps.cumsum() / per_s * 1e9).astype(np.int64).tolist()
    return arrivals_ns


def closed_loop(
    predict: Predict, requests: Sequence[Any], clients: int, threads: ThreadPoolExecutor
) -> dict[str, Any]:
    """Answer `requests` to so many of `threads`, each of which takes the next one when it has its answer.

    The threads should live on: what the CPU did in a thread that has ended, the kernel no longer tells.
    Answers the nanoseconds of each request, and the seconds from the first to the last. At the end fewer than
    `clients` are at work, each for less than one request. Raises what `predict` raises.
    """
    started_ns, finished_ns = (array("q", bytes(8 * len(requests))) for _ in range(2))
    tickets = itertools.count()  # `next` on it is atomic
    together = threading.Barrier(clients)
    clock, last = time.perf_counter_ns, len(requests)

    def client() -> None:
        try:
            settle(predict, requests[0])  # each thread: a runtime may keep threads of its own for each
            together.wait()
        except BaseException:
            together.abort()
            raise
        while (ticket := next(tickets)) < last:
            started_ns[ticket] = clock()
            predict(requests[ticket])
            finished_ns[ticket] = clock()

    futures = [threads.submit(client) for _ in range(clients)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    started, finished = np.asarray(started_ns), np.asarray(finished_ns)
    return {
        "latency_ns": (finished - started).tolist(),
        "seconds": float(finished.max() - started.min()) / 1e9,
    }


def one_at_a_time(predict: Predict) -> Predict:
    """`predict` for an engine that must not be called by two threads at once: they queue for it."""
    turn = threading.Lock()

    def wait_and_predict(request: Any) -> Any:
        with turn:
            return predict(request)

    return wait_and_predict


def settle(predict: Predict, request: Any) -> None:
    """Predict until a CPU that slept has reached its speed."""
    until_ns = time.perf_counter_ns() + _SETTLING_NS
    while time.perf_counter_ns() < until_ns:
        predict(request)
