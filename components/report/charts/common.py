"""What the pictures agree on."""

from __future__ import annotations

from collections.abc import Iterable

from hpml.artifacts.interval import Interval

Classes = dict[str, str]  # engine -> CSS class of its colour


def ends(intervals: Iterable[Interval]) -> list[float]:
    """The lower and the upper end of each interval."""
    return [end for interval in intervals for end in (interval.low, interval.high)]
