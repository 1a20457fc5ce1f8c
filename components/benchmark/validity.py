"""May the figures be quoted? What the slices do not show one by one: drift, and rounds that disagree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from components.benchmark.drift import drift
from components.benchmark.statistics import ratio_of_quantiles

if TYPE_CHECKING:
    from components.benchmark.protocol import Latencies
    from components.benchmark.stage import Quiet

_SIGNIFICANT = 0.01  # of a drift, shared by the engines of a run (Bonferroni)


def objections(latencies: Latencies, launches: tuple[int, ...], limits: Quiet, *, reference: str) -> str:
    """Why nothing of a run may be quoted; empty if all may. launches: how many rounds each had."""
    return "; ".join([*_drifts(latencies, limits), *_disagreements(latencies, launches, limits, reference)])


def _drifts(latencies: Latencies, limits: Quiet) -> Iterator[str]:
    """A p50 that changed in the course of the run has no one value."""
    for name, of_batch in latencies.items():
        found = drift(of_batch[1])
        if found.p_value < _SIGNIFICANT / len(latencies) and abs(math.log1p(found.change)) > limits.max_drift:
            yield (
                f"the p50 of {name} changed by {found.change:+.0%} in the course of the run, "
                f"{limits.max_drift:.0%} is allowed"
            )


def _disagreements(
    latencies: Latencies, launches: tuple[int, ...], limits: Quiet, reference: str
) -> Iterator[str]:
    """Rounds that disagree so much that a speed-up is not known."""
    for name, of_batch in latencies.items():
        ratio = ratio_of_quantiles(latencies[reference][1], of_batch[1], 0.5, launches)
        half_width = math.sqrt(ratio.high / ratio.low) - 1
        if half_width > limits.max_disagreement:
            yield (
                f"the rounds disagree: the speed of {name} is known to within {half_width:.0%} only, "
                f"{limits.max_disagreement:.0%} is allowed"
            )
