"""May the figures be quoted? What the slices do not show one by one: drift, and rounds that disagree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from components.benchmark.drift import drift
from components.benchmark.statistics import ratio_of_quantiles

if TYPE_CHECKING:
    from components.benchmark.protocol import Latencies
    from components.benchmark.stage import Quiet

_SIGNIFICANT = 0.01  # of a drift, shared by the engines of a run (Bonferroni)


def drifts(latencies: Latencies, limits: Quiet) -> list[str]:
    """Which engines have no one p50, because it changed in the course of the run; a sentence each."""
    found = []
    for name, of_batch in latencies.items():
        change = drift(of_batch[1])
        clear = change.p_value < _SIGNIFICANT / len(latencies)
        if clear and abs(math.log1p(change.change)) > limits.max_drift:
            found.append(
                f"the p50 of {name} changed by {change.change:+.0%} in the course of the run, "
                f"{limits.max_drift:.0%} is allowed"
            )
    return found


def disagreements(
    latencies: Latencies, launches: tuple[int, ...], limits: Quiet, *, reference: str
) -> list[str]:
    """Which speed-ups the rounds leave too far open; a sentence each. launches: how many rounds each had."""
    found = []
    for name, of_batch in latencies.items():
        ratio = ratio_of_quantiles(latencies[reference][1], of_batch[1], 0.5, launches)
        half_width = math.sqrt(ratio.high / ratio.low) - 1
        if half_width > limits.max_disagreement:
            found.append(
                f"the rounds disagree: the speed of {name} is known to within {half_width:.1%} only, "
                f"{limits.max_disagreement:.0%} is allowed"
            )
    return found
