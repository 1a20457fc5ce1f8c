"""Counts what is asked and answered in the bins of the model's reference, at a bounded cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml.tasks.drift.baseline import DriftReference, Observe
from hpml.tasks.drift.index import Counter

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays

WINDOW_ROWS = 1000  # a row that came so many rows ago counts 1/e of the latest
_LEAST_ROWS = 200.0  # before the index says more than chance
_MOST_ROWS = 16  # of a request
_SHARE_OF_TIME = 0.005  # so less than 1 % of requests, one after the other, meet it: p99 does not


class Drift:
    """Of one model. What it holds does not grow: a count for each bin.

    rows: that are counted, each by its weight; at most about WINDOW_ROWS. failures: requests that could not
    be counted.
    """

    def __init__(self, reference: DriftReference, observe: Observe) -> None:
        self._operation, self._observe = reference.operation, observe
        self._counters = {name: Counter(bins) for name, bins in reference.bins.items()}
        self._next_s = 0.0
        self.rows, self.failures = 0.0, 0

    def add(self, operation: str, inputs: Arrays, outputs: Arrays) -> None:
        """Count a request and its answer, unless counting has taken its share of the time lately."""
        if operation != self._operation or time.perf_counter() < self._next_s:
            return
        begun_s = time.thread_time()  # of this thread alone: it may wait for others in between
        try:
            self._count(_first_rows(inputs), _first_rows(outputs))
        except Exception:  # what is only for a metric must not end the server
            self.failures += 1
        self._next_s = time.perf_counter() + (time.thread_time() - begun_s) / _SHARE_OF_TIME

    def _count(self, inputs: Arrays, outputs: Arrays) -> None:
        rows = len(next(iter(inputs.values())))
        keep = (1 - 1 / WINDOW_ROWS) ** rows
        for name, values in self._observe(inputs, outputs).items():
            if name in self._counters:
                self._counters[name].add(values, keep)
        self.rows = self.rows * keep + rows

    def indices(self) -> dict[str, float]:
        """The population stability index of each quantity; none before there are rows enough."""
        if self.rows < _LEAST_ROWS:
            return {}
        return {name: counter.psi for name, counter in self._counters.items()}


def _first_rows(arrays: Arrays) -> Arrays:
    return {name: array[:_MOST_ROWS] for name, array in arrays.items()}
