"""A percentile of the latency of queries of which each is issued when the last is answered.

SingleStream has one sample a query, and p90; MultiStream has eight, and p99.
"""

from __future__ import annotations

import math

import numpy as np

from hpml.artifacts.measurements import ScenarioFigures, ScenarioName
from hpml.measuring.scenarios.base import ROUNDS, Scenario, Session, WorkerRequest, in_rounds
from hpml.measuring.statistics import early_stopping_bound, quantile, samples_needed


class LatencyPercentile(Scenario):
    """The quantile `level` of the latency, of at least `queries` queries where the time allows so many."""

    level: float
    queries: int

    def measure(self, session: Session) -> dict[str, ScenarioFigures]:
        """The quantile of every engine, in milliseconds, with its interval and its early-stopping bound.

        An engine that is too slow for the queries that the quantile needs is not run: it could not be quoted.
        """
        config = session.bench.config
        asked, figures = {}, {}
        for name in session.bench.names:
            affordable = session.affordable(session.latency_ms[name][self.samples_per_query])
            needed = samples_needed(self.level)
            if affordable < needed:
                figures[name] = self.unmeasured(config, session.not_enough(affordable, needed))
                continue
            queries = math.ceil(max(needed, min(self.queries, affordable)) / ROUNDS)
            arguments = {"batch": self.samples_per_query, "requests": queries}
            asked[name] = WorkerRequest("one_by_one", arguments)
        for name, replies in in_rounds(session.bench, asked, f"answering {self.name}").items():
            latency_ms = np.asarray([reply["latency_ns"] for reply in replies]) / 1e6
            found = {
                "value": quantile(latency_ms, self.level),
                "queries": latency_ms.size,
                "early_stopping_ms": early_stopping_bound(latency_ms.ravel().tolist(), self.level),
            }
            figures[name] = self.unmeasured(config).model_copy(update=found)
        return figures


class SingleStream(LatencyPercentile):
    """p90 needs 64 queries; they are cheap, and more make a narrower interval."""

    name: ScenarioName = "SingleStream"
    metric = "latency_ms_p90"
    level = 0.9
    queries = 210


class MultiStream(LatencyPercentile):
    """No more queries than p99 needs: eight samples take long."""

    name: ScenarioName = "MultiStream"
    metric = "latency_ms_p99"
    samples_per_query = 8
    level = 0.99
    queries = samples_needed(0.99)
