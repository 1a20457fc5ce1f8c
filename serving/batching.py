"""Requests that wait for the engine are answered together, and refused where they would wait too long."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpml.serving.errors import RequestRefused, overloaded
from hpml.tasks.base import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.serving.prometheus import Metrics
    from hpml.tasks.drift.live import Drift

    Arrays = Mapping[str, NDArray[Any]]

_SMOOTHING = 0.1  # of the engine's rate: what the last run counts against those before
_IN_PLACE_S = 0.0005  # waking a thread, and being woken by it, takes 0.1 to 0.2 ms on a virtual machine


@dataclass(eq=False)
class _Waiting:
    """A request: its rows of an operation's inputs, and who waits for the outputs."""

    operation: str
    feeds: Arrays
    rows: int
    answer: asyncio.Future[Arrays]
    since_s: float = field(default_factory=time.perf_counter)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind can be put together along the batch."""
        return self.operation, *((name, one.dtype, one.shape[1:]) for name, one in self.feeds.items())


class Batcher:
    """The queue before the engine, and the engine's own thread.

    Nothing is held back to fill a batch: what came in while the engine was busy is its next batch. So at low
    load a request is alone and waits for nothing, and batches grow with the load by themselves.

    What waits for an idle engine and is a run of less than `_IN_PLACE_S`, by the latest run of its kind, is
    run in the event loop: a thread would take longer to wake.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        max_rows: int,
        max_queue_s: float,
        metrics: Metrics,
        drift: Drift | None = None,
        record: Callable[[str, Arrays], None] | None = None,
    ) -> None:
        """max_rows: of one run of the engine. max_queue_s: the longest wait that is accepted.

        record: is given the operation and the inputs of one answered request of each run.
        """
        self._runs, self._max_rows, self._max_queue_s, self._metrics = runs, max_rows, max_queue_s, metrics
        self._drift, self._record = drift, record
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._rows_waiting = 0
        self._rows_per_s = 0.0  # of recent runs; 0: there was none
        self._latest_kind: tuple[Any, ...] = ()
        self._latest_row_s = math.inf
        self._is_running = False
        self._is_scheduled = False  # what waits, in place
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def ask(self, operation: str, feeds: Arrays, *, is_accepted: bool = False) -> asyncio.Future[Arrays]:
        """The outputs of an operation by name, once they are there; `feeds` has the batch in front.

        is_accepted: whether it is a further step of what was accepted, and waits as long as it has to.

        The future raises RequestRefused (400) if the engine refuses these inputs. Raises RequestRefused (429)
        at once if it would wait longer than is allowed, 503 after `close`.
        """
        rows = len(next(iter(feeds.values())))
        waiting = _Waiting(operation, feeds, rows, self._loop.create_future())
        with self._changed:
            if self._is_closed:
                raise RequestRefused(503, "another model takes over", {"retry-after": "1"})
            if not is_accepted:
                self.check_wait()
            self._queue.append(waiting)
            self._rows_waiting += rows
            if not self._is_short(waiting.kind):
                self._changed.notify()
            elif not self._is_scheduled:  # behind the requests that have come by now: they are one batch
                self._is_scheduled = True
                self._loop.call_soon(self._run_in_place)
        return waiting.answer

    def check_wait(self) -> None:
        """Raise RequestRefused (429) if a request would wait longer than is allowed."""
        wait_s = self._rows_waiting / self._rows_per_s if self._rows_per_s else 0.0
        if wait_s > self._max_queue_s:
            raise overloaded(f"{self._rows_waiting} rows wait already", wait_s)

    def _is_short(self, kind: tuple[Any, ...]) -> bool:
        """Whether the engine is idle and what waits is known to take less than a thread takes to wake."""
        is_known = kind == self._latest_kind and not self._is_running
        return is_known and self._rows_waiting * self._latest_row_s < _IN_PLACE_S

    def _run_in_place(self) -> None:
        with self._changed:
            self._is_scheduled = False
            if self._is_running or not self._queue:  # the thread has it
                return
            batch = self._next_batch()
            self._is_running = True
        self._answer(batch)
        with self._changed:
            if self._queue or self._is_closed:
                self._changed.notify()

    def close(self) -> None:
        """Answer what waits, then end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def rows_waiting(self) -> int:
        """Rows that no run has begun with."""
        return self._rows_waiting

    def _work(self) -> None:
        """In the engine's thread: run what waits, until all is answered and the batcher is closed."""
        while True:
            with self._changed:
                while self._is_running or not (self._queue or self._is_closed):
                    self._changed.wait()
                if not self._queue:
                    return
                batch = self._next_batch()
                self._is_running = True
            self._answer(batch)

    # ------------------------------------------------------------------- in the engine's thread, or in place

    def _next_batch(self) -> list[_Waiting]:
        """The oldest request, and those of its kind that fit into a run with it."""
        first = self._queue[0]
        batch, rows, left = [], 0, deque[_Waiting]()
        for waiting in self._queue:
            if waiting is first or (waiting.kind == first.kind and rows + waiting.rows <= self._max_rows):
                batch.append(waiting)
                rows += waiting.rows
            else:
                left.append(waiting)
        self._queue = left
        self._rows_waiting -= rows
        return [waiting for waiting in batch if not waiting.answer.cancelled()]

    def _answer(self, batch: list[_Waiting]) -> None:
        answers = self._answers(batch)
        self._is_running = False  # before anybody is told: who asks anew then finds the engine idle
        if threading.current_thread() is self._thread:
            self._loop.call_soon_threadsafe(self._tell, batch, answers)
        else:
            self._tell(batch, answers)

    def _answers(self, batch: list[_Waiting]) -> Sequence[Arrays | RequestRefused]:
        """To each; where the engine refuses them together, one may be to blame: they are run one by one."""
        if not batch:
            return []
        begun_s = time.perf_counter()
        try:
            outputs = self._run(batch)
        except Exception as error:  # ONNX Runtime's derive from nothing narrower
            if len(batch) == 1:
                return [_refusal(error)]
            return [answer for waiting in batch for answer in self._answers([waiting])]
        seconds, rows = time.perf_counter() - begun_s, sum(waiting.rows for waiting in batch)
        rate = rows / seconds
        self._rows_per_s = rate + (self._rows_per_s - rate) * (1 - _SMOOTHING) if self._rows_per_s else rate
        self._latest_kind, self._latest_row_s = batch[0].kind, seconds / rows
        self._metrics.ran(rows=rows, waited_s=begun_s - batch[0].since_s, seconds=seconds)
        return outputs

    def _run(self, batch: list[_Waiting]) -> list[Arrays]:
        """The outputs of each."""
        first = batch[0]
        if len(batch) == 1:
            return [self._runs.run(first.feeds, first.operation)]
        together = {name: np.concatenate([waiting.feeds[name] for waiting in batch]) for name in first.feeds}
        outputs = self._runs.run(together, first.operation)
        ends = np.cumsum([waiting.rows for waiting in batch])
        return [
            {name: array[end - waiting.rows : end] for name, array in outputs.items()}
            for waiting, end in zip(batch, ends, strict=True)
        ]

    def _tell(self, batch: list[_Waiting], answers: Sequence[Arrays | RequestRefused]) -> None:
        """In the event loop."""
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.answer.cancelled():
                continue
            if isinstance(answer, RequestRefused):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)
        if answers and not isinstance(answers[0], RequestRefused):
            # Behind those who wait: once the answers are out.
            self._loop.call_soon(self._note, batch[0], answers[0])

    def _note(self, asked: _Waiting, answer: Arrays) -> None:
        if self._drift:
            self._drift.add(asked.operation, asked.feeds, answer)
        if self._record:
            self._record(asked.operation, asked.feeds)


def _refusal(error: Exception) -> RequestRefused:
    """Of inputs that have the right types and shapes, such as an id that no row of an embedding has."""
    return RequestRefused(400, f"the engine refuses these inputs ({type(error).__name__})")
