"""Figures as a reader wants them: three significant digits, the bounds with the decimals of the value."""

from __future__ import annotations

import math
import re

from hpml.artifacts.interval import Interval

ABSENT = "–"  # noqa: RUF001
TIMES = "×"  # noqa: RUF001


def decimals(value: float, *, significant: int = 3) -> int:
    """How many decimals show `significant` digits of `value`."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, significant - 1 - math.floor(math.log10(abs(value))))


def plain(value: float, *, significant: int = 3) -> str:
    """`value` with `significant` digits, thousands separated, never in exponent form."""
    return f"{value:,.{decimals(value, significant=significant)}f}"


def bounds(interval: Interval, *, scale: float = 1.0, places: int | None = None) -> str:
    """The two ends of an interval with as many decimals as its value is shown with."""
    shown = decimals(interval.value * scale) if places is None else places
    return f"{interval.low * scale:,.{shown}f}–{interval.high * scale:,.{shown}f}"  # noqa: RUF001


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def megabytes(size_bytes: float) -> str:
    """A size in MB of 1e6 bytes."""
    return f"{plain(size_bytes / 1e6)} MB"


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds from two minutes on."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def shorten(text: str, length: int) -> str:
    """`text` with its middle left out where it is longer than `length`."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def sentence(text: str) -> str:
    """`text` with a full stop, and with a capital unless it begins with a name such as fp32/onnx."""
    first = text.partition(" ")[0].rstrip(",:;.")
    begun = text if re.search(r"[\d/_+.]", first) else f"{text[:1].upper()}{text[1:]}"
    return begun if begun.endswith(".") else f"{begun}."
