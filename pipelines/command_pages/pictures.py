"""The pictures of `hpml bench` and `hpml compare`: a row an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.reporting.format import shorten
from hpml.reporting.svg import Scale, dot, ends, is_narrow, line, padded, picture, row_name, x_axis

PERCENTILES = ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99")


def latency_picture(
    engines: Mapping[str, EngineFigures], classes: Mapping[str, str], width: float
) -> Element | None:
    """p50, p90 and p99 of each engine, from the largest dot to the smallest; None where none is quoted."""
    quoted = {
        name: intervals
        for name, engine in engines.items()
        if (intervals := [one for figure in PERCENTILES if (one := getattr(engine, figure))])
    }
    if not quoted:
        return None
    rows = _Rows(list(quoted), ends(one for intervals in quoted.values() for one in intervals), width)
    drawn = [*x_axis(rows.x, 4, rows.bottom, "latency at batch 1, ms (log scale)"), *rows.names()]
    for (name, intervals), y in zip(quoted.items(), rows.middles, strict=True):
        fastest, slowest = rows.x(intervals[0].value), rows.x(intervals[-1].value)
        drawn.append(line(fastest, y, slowest, y, f"whisker {classes[name]}"))
        for radius, interval in zip((5.0, 4.0, 3.0), intervals, strict=False):
            drawn += _whisker(rows.x, interval, y, classes[name], radius)
    return picture(width, rows.height, "p50, p90 and p99 of each engine", drawn)


def ratio_picture(
    ratios: Mapping[str, Interval], classes: Mapping[str, str], axis: str, width: float
) -> Element | None:
    """Ratios with their intervals around 1; None where there are none."""
    if not ratios:
        return None
    rows = _Rows(list(ratios), [1.0, *ends(ratios.values())], width)
    title = shorten(f"{axis} (log scale)", int((rows.x.end - rows.x.start) / 7))
    drawn = x_axis(rows.x, 4, rows.bottom, title)
    drawn += [line(rows.x(1.0), 4, rows.x(1.0), rows.bottom, "floor"), *rows.names()]
    for (name, ratio), y in zip(ratios.items(), rows.middles, strict=True):
        drawn += _whisker(rows.x, ratio, y, classes[name], 4.5)
    return picture(width, rows.height, f"{axis}, with intervals", drawn)


class _Rows:
    """Rows with a name each, over a common log axis."""

    def __init__(self, names: Sequence[str], values: Sequence[float], width: float) -> None:
        self._names, self._narrow = names, is_narrow(width)
        pitch, below = (46, 14) if self._narrow else (30, 15)
        self.bottom = 6 + pitch * len(names)
        self.height = self.bottom + 44
        self.middles = [6 + pitch * (index + 1) - below for index in range(len(names))]
        self.x = padded(values, 20 if self._narrow else 230, width - 16, log=True)

    def names(self) -> list[Element]:
        """The names of the rows."""
        return [
            row_name(name, self.x.start, beside=y + 4, above=y - 14, narrow=self._narrow)
            for name, y in zip(self._names, self.middles, strict=True)
        ]


def _whisker(x: Scale, interval: Interval, y: float, class_: str, radius: float) -> list[Element]:
    low, high = x(interval.low), x(interval.high)
    strokes = [line(low, y, high, y, f"mark {class_}")]
    strokes += [line(end, y - 5, end, y + 5, f"mark {class_}") for end in (low, high)]
    return [*strokes, dot(x(interval.value), y, radius, f"point {class_}")]
