"""What our pictures are drawn with, in pixels: scales with round ticks, axes, shapes, text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.reporting.markup import Child, node, number

FONT_PX = 12
_CHARACTER_PX = 0.56 * FONT_PX  # a little more than the average of a sans-serif


def text_width(text: str) -> float:
    """About how wide `text` is, rather too much than too little."""
    return _CHARACTER_PX * len(text)


# ------------------------------------------------------------------------------------------ scales and ticks


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where `value` is, in pixels."""
        low, high, at = (self.low, self.high, value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """At most `most` round values within the scale."""
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def padded(
    values: Iterable[float], start: float, end: float, *, log: bool = False, by: float = 0.06
) -> Scale:
    """A scale over all `values` with some air at both ends."""
    known = list(values)
    low, high = min(known), max(known)
    if log:
        factor = max(high / low, 1.2) ** by
        return Scale(low / factor, high * factor, start, end, log=True)
    air = by * (high - low or abs(high) or 1.0)
    return Scale(low - air, high + air, start, end)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten within [`low`, `high`]."""
    exponent = math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(index * step, max(0, 1 - exponent)) for index in range(first, last + 1)]
    raise AssertionError("a step of 50 powers of ten leaves no more than one tick")


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round values within [`low`, `high`]; linear ones where the range has too few of them."""
    for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        within = [float(f"{value:.3g}") for value in values if low <= value <= high]
        if len(within) <= most:
            break
    else:
        within = within[:: math.ceil(len(within) / most)]
    return within if len(within) >= min(3, most) else linear_ticks(low, high, most)


def tick_labels(scale: Scale, ticks: Sequence[float]) -> list[str]:
    """The ticks as text, all with the same decimals; over decades of a log scale each with what it needs."""
    needed = [len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks]
    decades = scale.log and scale.high / scale.low > 5
    shown = needed if decades else [max(needed, default=0)] * len(ticks)
    return [f"{tick:,.{places}f}" for tick, places in zip(ticks, shown, strict=True)]


# ---------------------------------------------------------------------------------------------------- shapes


def picture(width: float, height: float, title: str, *children: Child | Iterable[Child]) -> Element:
    """An SVG of its natural size; `title` says what it shows to whoever does not see it."""
    return node(
        "svg",
        node("title", title),
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """A straight line."""
    return node("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def label(text: str, x: float, y: float, class_: str = "", *, anchor: str = "start") -> Element:
    """Text whose baseline begins, is centred, or ends at (x, y)."""
    return node(
        "text",
        text,
        x=x,
        y=y,
        class_=class_ or None,
        text_anchor=None if anchor == "start" else anchor,
    )


def path(points: Sequence[tuple[float, float]], class_: str, *, closed: bool = False) -> Element:
    """A polyline through `points`, or a polygon."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return node("path", d=f"M{steps}{'Z' if closed else ''}", class_=class_)


def dot(x: float, y: float, radius: float, class_: str) -> Element:
    """A circle."""
    return node("circle", cx=x, cy=y, r=radius, class_=class_)


def x_axis(scale: Scale, top: float, bottom: float, title: str, *, whole: bool = False) -> list[Element]:
    """Vertical grid lines, numbers below, and the title of the axis under them. whole: no fractions."""
    most = max(2, int(abs(scale.end - scale.start) / 62))
    ticks = [tick for tick in scale.ticks(most) if not whole or tick.is_integer()]
    drawn = [line(scale(tick), top, scale(tick), bottom, "grid") for tick in ticks]
    for tick, text in zip(ticks, tick_labels(scale, ticks), strict=True):
        drawn.append(label(text, scale(tick), bottom + 17, anchor="middle"))
    middle = (scale.start + scale.end) / 2
    return [*drawn, label(title, middle, bottom + 36, "axis", anchor="middle")]


def y_axis(scale: Scale, left: float, right: float, title: str, *, unit: str = "") -> list[Element]:
    """Horizontal grid lines, numbers to the left, and the title of the axis above them."""
    most = max(2, int(abs(scale.end - scale.start) / 38))
    ticks = scale.ticks(most)
    drawn = [line(left, scale(tick), right, scale(tick), "grid") for tick in ticks]
    for tick, text in zip(ticks, tick_labels(scale, ticks), strict=True):
        drawn.append(label(text + unit, left - 8, scale(tick) + 4, anchor="end"))
    return [*drawn, label(title, 0, min(scale.start, scale.end) - 12, "axis")]
