"""A figure with its interval."""

from __future__ import annotations

from hpml.core.contract import Config


class Interval(Config):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high

    def inverse(self) -> Interval:
        """Of one over the figure."""
        return Interval(value=1 / self.value, low=1 / self.high, high=1 / self.low)

    def scaled(self, factor: float) -> Interval:
        """Of the figure times `factor`, which is above 0."""
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)
