"""How points are measured: all once a round, in a random order, each the best of several goes.

What is wanted is a maximum, and what disturbs can only slow down: an interrupt, another process, a page that
was elsewhere. So the best of the goes within a round counts, which leaves out disturbances shorter than a
go. The rounds are seconds apart and differ by what lasts longer, such as the clock of the CPU or a neighbour
on the same host. The figure is their mean, with an interval, and not the best of all: nobody could say how
likely that is to be reached again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint
from hpml.components.peaks.config import PeaksConfig
from hpml.core.errors import HpmlError
from hpml.measuring.statistics import geometric_mean

MIN_ROUNDS = 5
_VISIT_S = 0.005  # for each point in each round, at least
_LONG_GO_S = 0.05  # one such go is enough: what disturbs for a moment is a small part of it
_MIN_GOES = 2
_REPEATS = 3  # of a point that was disturbed

Point = BandwidthPoint | GemmPoint


class NotMeasurable(Exception):
    """A point that cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Timed:
    """What is timed: `seconds()` does it once and says how long it took, for `amount` bytes or operations."""

    seconds: Callable[[], float]
    amount: float

    def rate(self) -> float:
        """The best of several goes, in 1e9 a second."""
        best_s, spent_s, goes = float("inf"), 0.0, 0
        while spent_s < _VISIT_S or (goes < _MIN_GOES and spent_s < _LONG_GO_S):
            took_s = self.seconds()
            best_s, spent_s, goes = min(best_s, took_s), spent_s + took_s, goes + 1
        return self.amount / best_s / 1e9


@dataclass(frozen=True)
class Probe:
    """A point still without its figure, and how to measure it. `prepare` raises NotMeasurable."""

    point: Point
    prepare: Callable[[], Timed]


def prepare(probes: Sequence[Probe]) -> tuple[dict[int, Timed], dict[int, str]]:
    """Make the probes ready, by index: those that can be measured, and of the others why not."""
    timed: dict[int, Timed] = {}
    reasons: dict[int, str] = {}
    for index, probe in enumerate(probes):
        try:
            timed[index] = probe.prepare()
        except HpmlError:  # a signal's
            raise
        except NotMeasurable as reason:
            reasons[index] = str(reason)
        except Exception as error:  # a library's, about what it does not support; they share no base
            reasons[index] = f"not supported: {' '.join(str(error).split())[:160]}"
    return timed, reasons


def rates_by_round(
    timed: Mapping[int, Timed], config: PeaksConfig, *, deadline_s: float, progress: Callable[[int], None]
) -> dict[int, list[float]]:
    """The rate of each point in each round, over as many rounds as the deadline allows, 5 at least.

    At the end of a round a point that lags behind its own best by more than `max_spread` is measured again,
    as long as there is time, at most 3 times: the disturbance may have passed.
    """
    rates: dict[int, list[float]] = {index: [] for index in timed}
    rng = np.random.default_rng(config.seed)
    for done in range(config.rounds):
        if done >= MIN_ROUNDS and time.monotonic() > deadline_s:
            break
        for index in rng.permutation(list(timed)):
            rates[index].append(timed[index].rate())
        for _ in range(_REPEATS):
            for index, of_point in rates.items():
                lags = of_point[-1] < (1 - config.max_spread) * max(of_point)
                if lags and time.monotonic() < deadline_s:
                    of_point[-1] = max(of_point[-1], timed[index].rate())
        progress(done + 1)
    return rates


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
