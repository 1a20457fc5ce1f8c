"""SingleStream: one sample a query, the next query when the last is answered; p90 of the latency."""

from __future__ import annotations

from hpml.artifacts.measurements import ScenarioName
from hpml.measuring.scenarios.percentile import LatencyPercentile


class SingleStream(LatencyPercentile):
    """p90 needs 64 queries; they are cheap, and more make a narrower interval."""

    name: ScenarioName = "SingleStream"
    metric = "latency_ms_p90"
    level = 0.9
    queries = 210
