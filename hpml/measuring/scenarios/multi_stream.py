"""MultiStream: eight samples a query, the next query when the last is answered; p99 of its latency."""

from __future__ import annotations

from hpml.artifacts.measurements import ScenarioName
from hpml.measuring.scenarios.percentile import LatencyPercentile
from hpml.measuring.statistics import samples_needed


class MultiStream(LatencyPercentile):
    """No more queries than p99 needs: eight samples take long."""

    name: ScenarioName = "MultiStream"
    metric = "latency_ms_p99"
    samples_per_query = 8
    level = 0.99
    queries = samples_needed(0.99)
