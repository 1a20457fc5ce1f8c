"""Offline: all samples are there at once, and the engine is given them in batches; samples per second."""

from __future__ import annotations

import math

import numpy as np

from hpml.artifacts.measurements import ScenarioFigures, ScenarioName
from hpml.measuring.scenarios.base import ROUNDS, Scenario, Session, WorkerRequest, in_rounds
from hpml.measuring.statistics import rate

_QUERY_S = 0.05  # about how long the query of a round takes; one batch of a slow engine takes longer


class Offline(Scenario):
    """One query a round."""

    name: ScenarioName = "Offline"
    metric = "samples_per_s"

    def measure(self, session: Session) -> dict[str, ScenarioFigures]:
        """Samples per second of every engine at the batch size that was its best in the trials."""
        best, batches, asked = {}, {}, {}
        for name in session.bench.names:
            best[name] = _best_batch(session, name)
            batches[name] = math.ceil(1e3 * _QUERY_S / session.latency_ms[name][best[name]])
            asked[name] = WorkerRequest("one_by_one", {"batch": best[name], "requests": batches[name]})
        figures = {}
        for name, replies in in_rounds(session.bench, asked, "answering Offline").items():
            samples = best[name] * batches[name]
            found = {
                "value": rate(samples, np.asarray([[reply["seconds"]] for reply in replies])),
                "queries": ROUNDS,
                "samples_per_query": samples,
                "batch": best[name],
            }
            figures[name] = self.unmeasured(session.bench.config).model_copy(update=found)
        return figures


def _best_batch(session: Session, name: str) -> int:
    """The batch size with the least time a sample in the trials."""
    latency_ms = session.latency_ms[name]
    return min(session.bench.config.timed_batches, key=lambda batch: latency_ms[batch] / batch)
