"""The process of one measured engine: python -m hpml.measuring.process.worker FD PARENT_PID MEMORY_BYTES.

It answers JSON requests on an inherited socket, blocks between them (an idle engine must not disturb the one
that is timed), and dies with its parent.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from hpml.core.process import peak_rss_bytes, serve
from hpml.measuring.machine.run_queue import Reading, RunQueue
from hpml.measuring.machine.watch import SETTLING_NS
from hpml.measuring.subjects import AnySubject, Opened

_READING_NS = 500_000  # between two readings of the run queues, some microseconds each
_NO_OP_REQUESTS = 1000
_MOST_CLIENTS = 256

Predict = Callable[[Any], Any]


class Engine:
    """An opened subject and its requests. Its public methods are what a worker can be asked."""

    def load(
        self,
        subject: dict[str, Any],
        inputs: str,
        batch_sizes: list[int],
        threads: int,
        spinning: bool | None = None,
    ) -> dict[str, Any]:
        """Open `subject`, take its first answer, check it, and prepare requests of the arrays in `inputs`.

        inputs: an .npz file, one array (rows, ...) an input. Answers the milliseconds that opening took, and
        when the first answer was there, in nanoseconds of the machine's monotonic clock.
        Raises StageFailed if the subject cannot be opened or answers wrongly.
        """
        chosen: AnySubject = TypeAdapter(AnySubject).validate_python(subject)
        with np.load(inputs, allow_pickle=False) as file:
            arrays = {name: np.ascontiguousarray(file[name]) for name in file.files}
        begun_ns = time.perf_counter_ns()
        opened = chosen.open(threads=threads, spinning=spinning)
        loaded_ns = time.perf_counter_ns()
        opened.predict(_requests(opened, arrays, 1)[0])
        answered_ns = time.perf_counter_ns()
        chosen.check(opened)
        self._opened, self._predict, self._arrays = opened, opened.predict, arrays
        self._clients = ThreadPoolExecutor(_MOST_CLIENTS)  # starts threads when they are first needed
        self._inputs = _Inputs(opened, arrays)
        prepared = [self._inputs[batch] for batch in batch_sizes]  # before anything is timed
        return {
            "load_ms": (loaded_ns - begun_ns) / 1e6,
            "answered_ns": answered_ns,
            "harness_us_per_request": _harness_us(prepared[0]),
            "device": opened.device,
        }

    def warm_up(self, batch: int, requests: int, seconds: float) -> dict[str, Any]:
        """Predict `requests` times or for so many seconds; answers the milliseconds of the fastest."""
        until_s = time.perf_counter() + seconds
        latencies_ms = []
        for x in itertools.islice(self._inputs[batch], requests):
            begun_s = time.perf_counter()
            self._predict(x)
            finished_s = time.perf_counter()
            latencies_ms.append((finished_s - begun_s) * 1e3)
            if finished_s > until_s:
                break
        return {"latency_ms": min(latencies_ms)}

    def time(self, batch: int, requests: int) -> dict[str, Any]:
        """Latencies of `requests` predictions at `batch`, back to back, and who waited for a CPU meanwhile.

        Times are nanoseconds of the machine's monotonic clock; `readings` are those of `watch.undisturbed`.
        On a GPU also the milliseconds between two events on the engine's stream, around each prediction.
        """
        with RunQueue() as queue:
            timed = time_requests(self._predict, self._inputs[batch], requests, queue)
        started_ns, finished_ns, readings = timed
        stream, device_ms = self._opened.stream, []
        if stream is not None:
            device_ms = _device_ms(self._predict, self._inputs[batch], requests, stream)
        return {
            "started_ns": started_ns.tolist(),
            "finished_ns": finished_ns.tolist(),
            "readings": readings,
            "device_ms": device_ms,
        }

    def run_for(self, batch: int, seconds: float) -> dict[str, Any]:
        """Predict for so many seconds, untimed; answers how many requests that were."""
        until_s = time.perf_counter() + seconds
        for count, x in enumerate(self._inputs[batch], 1):
            self._predict(x)
            if time.perf_counter() > until_s:
                return {"requests": count}
        raise AssertionError("the inputs are endless")

    def one_by_one(self, batch: int, requests: int) -> dict[str, Any]:
        """Latencies in nanoseconds of so many predictions at `batch`, and the seconds of all together."""
        started_ns, finished_ns, _ = time_requests(self._predict, self._inputs[batch], requests)
        return {
            "latency_ns": (finished_ns - started_ns).tolist(),
            "seconds": float(finished_ns[-1] - started_ns[0]) / 1e9,
        }

    def by_arrival(
        self, requests_per_s: float, requests: int, bound_ms: float, allowed: int, seed: int
    ) -> dict[str, Any]:
        """Poisson arrivals; see `hpml.measuring.scenarios.workload`."""
        from hpml.measuring.scenarios import workload

        return workload.by_arrival(
            self._predict,
            list(itertools.islice(self._inputs[1], requests)),
            workload.poisson_ns(requests, requests_per_s, seed=seed),
            bound_ns=round(bound_ms * 1e6),
            allowed=allowed,
        )

    def closed_loop(self, clients: int, requests: int) -> dict[str, Any]:
        """Clients at once; see `hpml.measuring.scenarios.workload`."""
        from hpml.measuring.scenarios import workload

        predict = self._predict if self._opened.thread_safe else workload.one_at_a_time(self._predict)
        timed = list(itertools.islice(self._inputs[1], requests))
        return workload.closed_loop(predict, timed, clients, self._clients)

    def outputs(self, requests: list[tuple[int, int]], seconds: float, file: str) -> dict[str, Any]:
        """Write what it answers to so many requests of each batch size; see `hpml.measuring.outputs`."""
        from hpml.measuring import outputs

        own = self._opened.outputs
        return outputs.write(own, self._arrays, Path(file), requests=requests, seconds=seconds)

    def memory(self) -> dict[str, Any]:
        """The largest resident set of this process so far; None where the system does not tell it."""
        return {"peak_rss_bytes": peak_rss_bytes()}


class _Inputs(dict[int, Iterator[Any]]):
    """Endless requests of each batch size, made when they are first wanted."""

    def __init__(self, opened: Opened, arrays: Mapping[str, NDArray[Any]]) -> None:
        super().__init__()
        self._opened, self._predict, self._arrays = opened, opened.predict, arrays

    def __missing__(self, batch: int) -> Iterator[Any]:
        self[batch] = itertools.cycle(_requests(self._opened, self._arrays, batch))
        return self[batch]


def time_requests(
    predict: Predict, inputs: Iterator[Any], requests: int, queue: RunQueue | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Reading]]:
    """When each of `requests` inputs was given to `predict`, back to back, and when it was done, in ns.

    Before that `predict` runs, through the very same code, until a CPU that slept has settled. The readings
    of `queue` are from before the first request, between some, and after the last.
    """
    timed = list(itertools.islice(inputs, requests))
    started_ns, finished_ns = (array("q", bytes(8 * requests)) for _ in range(2))
    settled_ns = time.perf_counter_ns() + SETTLING_NS
    while time.perf_counter_ns() < settled_ns:
        _stamp(predict, timed[:1], started_ns, finished_ns, queue)
    readings = _stamp(predict, timed, started_ns, finished_ns, queue)
    return np.asarray(started_ns), np.asarray(finished_ns), readings


def _stamp(
    predict: Predict,
    inputs: list[Any],
    started_ns: MutableSequence[int],
    finished_ns: MutableSequence[int],
    queue: RunQueue | None,
) -> list[Reading]:
    clock = time.perf_counter_ns
    readings: list[Reading] = []

    def read() -> int:
        """Read the queue, and say when to do so again."""
        now_ns = clock()
        readings.append((now_ns, queue.read() if queue else {}))
        return now_ns + _READING_NS

    due_ns = read()
    for index, request in enumerate(inputs):
        started_ns[index] = clock()
        predict(request)
        finished_ns[index] = finished = clock()
        if finished > due_ns:
            due_ns = read()
    read()
    return readings


def _device_ms(predict: Predict, inputs: Iterator[Any], requests: int, stream: Any) -> list[float]:
    """Milliseconds on the GPU of each prediction. Requests of their own: recording an event takes time."""
    import torch

    event: Callable[..., Any] = torch.cuda.Event
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(requests)]
    for x, (begun, done) in zip(inputs, events, strict=False):
        begun.record(stream)
        predict(x)
        done.record(stream)
    torch.cuda.synchronize()
    return [begun.elapsed_time(done) for begun, done in events]


def _harness_us(inputs: Iterator[Any]) -> float:
    """Microseconds from one request to the next where predicting takes no time."""
    started_ns, _, _ = time_requests(lambda _: None, inputs, _NO_OP_REQUESTS)
    return float(np.median(np.diff(started_ns))) / 1e3


def _requests(opened: Opened, arrays: Mapping[str, NDArray[Any]], batch: int) -> list[Any]:
    """Requests of `batch` consecutive rows, as many as there are whole ones; views, not copies.

    Where there are fewer rows than that, one request in which they repeat.
    """
    rows = min(len(array) for array in arrays.values())
    if rows < batch:
        repeated = {
            name: np.resize(array[:rows], (batch, *array.shape[1:])) for name, array in arrays.items()
        }
        return [opened.request(repeated)]
    return [
        opened.request({name: array[start : start + batch] for name, array in arrays.items()})
        for start in range(0, rows - batch + 1, batch)
    ]


def main(engine: Engine) -> None:
    """Be the process of one engine."""
    gc.disable()  # a collection in the middle of a request would be measured as the engine's
    methods = inspect.getmembers(engine, inspect.ismethod)
    serve({name: method for name, method in methods if not name.startswith("_")})


if __name__ == "__main__":
    main(Engine())
