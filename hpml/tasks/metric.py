"""A measure of how good a network's answers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from hpml.artifacts.metric import MetricFacts


def mean_of(sums: Sequence[float]) -> float:
    """The mean of what was summed: the first statistic is its sum, the second how many there are."""
    return sums[0] / sums[1]


@dataclass(frozen=True)
class Limits:
    """What a metric can be at least and at most, and its largest loss; None: there is no bound."""

    least: float | None = None
    most: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Metric(MetricFacts):
    """A figure of a split that follows from sums over its rows.

    value: of the sums of the statistics of the rows, such as (recognised, all). statistics: how many.
    least, most: what it can be; None: there is no bound, but for a share, which is 1 at most.
    """

    value: Callable[[Sequence[float]], float] = mean_of
    statistics: int = 2
    least: float | None = None
    most: float | None = None

    @property
    def limits(self) -> Limits:
        """What a recipe can ask of it: a loss is relative but for shares, see `MetricFacts.loss`."""
        most = 1.0 if self.is_share and self.most is None else self.most
        can_lose_all = self.least == 0 and self.better == "higher"
        return Limits(self.least, most, 1.0 if can_lose_all else None)

    @property
    def facts(self) -> MetricFacts:
        """What artifacts hold of it."""
        return MetricFacts(**{field.name: getattr(self, field.name) for field in fields(MetricFacts)})
