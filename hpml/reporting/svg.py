"""What our pictures are drawn with, in pixels: scales with round ticks, axes, shapes, text.

A picture is a tree of elements: text and attributes are escaped when it is written, always.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.reporting.format import shorten

WIDE_PX, HALF_PX, NARROW_PX = 952, 466, 350  # on a desktop, of a pair there, on a phone
_CHARACTER_PX = 0.56 * 12  # a little more than the average of a sans-serif of 12 pixels


def is_narrow(width: float) -> bool:
    """Whether names stand above what they name instead of to its left."""
    return width <= 500


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


def ends(intervals: Iterable[Interval]) -> list[float]:
    """The lower and the upper end of each interval."""
    return [end for interval in intervals for end in (interval.low, interval.high)]


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


def node(tag: str, *children: Element, text: str | None = None, **attributes: str | float | None) -> Element:
    """An element. An attribute is spelt with `_` for `-` (`class_` for `class`); None is left out."""
    named = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else number(value)
        for name, value in attributes.items()
        if value is not None
    }
    element = Element(tag, named)
    element.text = text
    element.extend(children)
    return element


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def picture(width: float, height: float, title: str, drawn: Iterable[Element]) -> Element:
    """An SVG of its natural size; `title` says what it shows to whoever does not see it."""
    box = f"0 0 {number(width)} {number(height)}"
    described = node("title", text=title)
    return node("svg", described, *drawn, viewBox=box, width=width, height=height, role="img")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    """A straight line."""
    return node("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def label(text: str, x: float, y: float, class_: str | None = None, *, anchor: str = "start") -> Element:
    """Text whose baseline begins, is centred ("middle"), or ends ("end") at (x, y)."""
    named = None if anchor == "start" else anchor
    return node("text", text=text, x=x, y=y, class_=class_, text_anchor=named)


def row_name(
    text: str, left: float, *, beside: float, above: float, narrow: bool, strong: bool = False
) -> Element:
    """The name of a row that begins at `left`: to its left, or above where the picture is narrow."""
    class_ = "name strong" if strong else "name"
    if narrow:
        return label(shorten(text, 44), left, above, class_)
    room = left - 14
    return label(shorten(text, round(room / _CHARACTER_PX)), room, beside, class_, anchor="end")


def path(points: Sequence[tuple[float, float]], class_: str, *, closed: bool = False) -> Element:
    """A polyline through `points`, or a polygon."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return node("path", d=f"M{steps}{'Z' if closed else ''}", class_=class_)


def dot(x: float, y: float, radius: float, class_: str) -> Element:
    """A circle."""
    return node("circle", cx=x, cy=y, r=radius, class_=class_)


def axes(x: Scale, y: Scale, x_title: str, y_title: str) -> list[Element]:
    """Both axes of a picture that is all of `x` and of `y`."""
    return [*x_axis(x, y.end, y.start, x_title), *y_axis(y, x.start, x.end, y_title)]


def x_axis(scale: Scale, top: float, bottom: float, title: str, *, whole: bool = False) -> list[Element]:
    """Vertical grid lines, numbers below, and the title of the axis under them. whole: no fractions."""
    most = max(2, int(abs(scale.end - scale.start) / 62))
    ticks = [tick for tick in scale.ticks(most) if not whole or tick.is_integer()]
    texts = zip(map(scale, ticks), tick_labels(scale, ticks), strict=True)
    return x_axis_with(texts, scale, top, bottom, title)


def x_axis_with(
    ticks: Iterable[tuple[float, str]], scale: Scale, top: float, bottom: float, title: str
) -> list[Element]:
    """The same with `ticks` of your own: where each is, in pixels, and its text."""
    known = list(ticks)
    lines = [line(at, top, at, bottom, "grid") for at, _ in known]
    numbers = [label(text, at, bottom + 17, anchor="middle") for at, text in known]
    middle = (scale.start + scale.end) / 2
    return [*lines, *numbers, label(title, middle, bottom + 36, "axis", anchor="middle")]


def y_axis(scale: Scale, left: float, right: float, title: str) -> list[Element]:
    """Horizontal grid lines, numbers to the left, and the title of the axis above them."""
    ticks = scale.ticks(max(2, int(abs(scale.end - scale.start) / 38)))
    drawn = [line(left, scale(tick), right, scale(tick), "grid") for tick in ticks]
    for tick, text in zip(ticks, tick_labels(scale, ticks), strict=True):
        drawn.append(label(text, left - 8, scale(tick) + 4, anchor="end"))
    return [*drawn, label(title, 0, min(scale.start, scale.end) - 12, "axis")]
