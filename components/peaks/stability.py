"""From the rates of a point in each round to a figure that may be quoted, or the reason why it may not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hpml.artifacts.interval import Interval
from hpml.measuring.statistics import geometric_mean


def figure(rates: Sequence[float], *, max_spread: float) -> tuple[Interval | None, str]:
    """The geometric mean of `rates` with its 95 % interval; or None, and why.

    It is stable where the middle half of the rounds, and the interval, are each no wider than `max_spread`
    as a share of the figure.
    """
    interval = geometric_mean(rates)
    lower, median, upper = statistics.quantiles(rates, n=4, method="inclusive")
    spread = (upper - lower) / median
    if spread > max_spread:
        return None, f"not stable: rounds differ by {100 * spread:.0f} %"
    width = (interval.high - interval.low) / interval.value
    if width > max_spread:
        return None, f"not stable: the 95 % interval is {100 * width:.0f} % wide"
    return interval, ""
