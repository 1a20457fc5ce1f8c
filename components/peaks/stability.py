"""From the rates of a point in each round to a figure that may be quoted, or the reason why it may not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpml.artifacts.interval import Interval
from hpml.measuring.statistics import student_t

_LEVEL = 0.975  # of Student's t: two sides of 95 %


def figure(rates: Sequence[float], *, max_spread: float) -> tuple[Interval | None, str]:
    """The geometric mean of `rates` with its 95 % interval; or None, and why.

    It is stable where the middle half of the rounds, and the interval, are each no wider than `max_spread`
    as a share of the figure.
    """
    interval = log_t_interval(rates)
    lower, median, upper = statistics.quantiles(rates, n=4, method="inclusive")
    spread = (upper - lower) / median
    if spread > max_spread:
        return None, f"not stable: rounds differ by {100 * spread:.0f} %"
    width = (interval.high - interval.low) / interval.value
    if width > max_spread:
        return None, f"not stable: the 95 % interval is {100 * width:.0f} % wide"
    return interval, ""


def log_t_interval(rates: Sequence[float]) -> Interval:
    """The geometric mean with the 95 % interval of Student's t on the logarithm."""
    logs = [math.log(rate) for rate in rates]
    value = math.exp(statistics.fmean(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    factor = math.exp(error * student_t(_LEVEL, len(logs) - 1))
    return Interval(value=value, low=value / factor, high=value * factor)
