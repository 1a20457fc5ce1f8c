"""A percentile of the latency of queries of which each is issued when the last is answered."""

from __future__ import annotations

import math

import numpy as np

from hpml.artifacts.measurements import ScenarioFigures
from hpml.measuring.scenarios import early_stopping
from hpml.measuring.scenarios.base import ROUNDS, Scenario, Session, in_rounds
from hpml.measuring.statistics import quantile, samples_needed


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
            asked[name] = session.backend.one_by_one(
                self.name,
                samples_per_query=self.samples_per_query,
                queries=math.ceil(max(needed, min(self.queries, affordable)) / ROUNDS),
            )
        for name, replies in in_rounds(session.bench, asked, f"answering {self.name}").items():
            latency_ms = np.asarray([reply["latency_ns"] for reply in replies]) / 1e6
            found = {
                "value": quantile(latency_ms, self.level),
                "queries": latency_ms.size,
                "early_stopping_ms": early_stopping.bound(latency_ms.ravel().tolist(), self.level),
            }
            figures[name] = self.unmeasured(config).model_copy(update=found)
        return figures
