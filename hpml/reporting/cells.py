"""What stands in the cells of tables: figures with their 95 % intervals, names in their colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpml.artifacts.interval import Interval
from hpml.artifacts.metric import MetricFacts
from hpml.reporting.format import ABSENT, bounds, megabytes, plain


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    small: lines below the text, empty ones left out. style: the CSS class of the text; empty where it may be
    broken into lines. key: the CSS class of the colour of a name.
    """

    text: str = ABSENT
    small: tuple[str, ...] = ()
    style: str = "value"
    key: str = ""

    @property
    def lines(self) -> str:
        """The cell for a terminal."""
        return "\n".join(filter(None, (self.text, *self.small)))


Row = dict[str, Cell]  # by the names of the columns


def interval_cell(
    interval: Interval | None, absent: str = "", *, scale: float = 1.0, places: int | None = None
) -> Cell:
    """A figure over its 95 % interval, or why there is none."""
    if interval is None:
        return Cell(small=(absent,))
    certain = interval.low == interval.high  # a ratio to itself
    small = "" if certain else bounds(interval, scale=scale, places=places)
    return Cell(value_text(interval, scale, places), (small,))


def quality_cell(quality: Mapping[str, Interval], metric: MetricFacts) -> Cell:
    """A metric of an engine, for a column with the metric's heading."""
    return interval_cell(quality.get(metric.name), scale=metric.scale, places=metric.places)


def value_text(interval: Interval, scale: float = 1.0, places: int | None = None) -> str:
    """A figure without its interval, with three significant digits or with `places` decimals."""
    value = interval.value * scale
    return plain(value) if places is None else f"{value:,.{places}f}"


def named(name: str, classes: Mapping[str, str], settings: str = "") -> Cell:
    """An engine behind the dot of its colour, and below it its settings."""
    return Cell(name, (settings,), key=classes[name])


def megabytes_cell(size_bytes: int | None, absent: str = "") -> Cell:
    """A size in MB, or why there is none."""
    return Cell(megabytes(size_bytes)) if size_bytes else Cell(small=(absent,))
