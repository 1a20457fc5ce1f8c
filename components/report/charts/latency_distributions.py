"""How the latencies of each engine are distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.components.report.content import Content
from hpml.reporting.svg import Scale, is_narrow, label, line, padded, path, picture, row_name, x_axis

if TYPE_CHECKING:
    from numpy.typing import NDArray


def latency_distributions(content: Content, classes: Mapping[str, str], width: float) -> Element:
    """The density of each engine's latencies over a common log axis, p50, p90 and p99 marked."""
    narrow = is_narrow(width)
    pitch, left, top = (74, 8, 4) if narrow else (56, 214, 4)
    bottom = top + pitch * len(content.latency_ms) + 6
    x = _latency_scale(content.latency_ms.values(), left, width - 14)
    drawn = x_axis(x, top, bottom, "latency at batch 1, ms (log scale)")
    for index, (name, latency_ms) in enumerate(content.latency_ms.items()):
        base = top + pitch * (index + 1) - 16
        outline = [(at, base - 30 * share) for at, share in _density(latency_ms, x)]
        outline = [(outline[0][0], base), *outline, (outline[-1][0], base)]
        strong = name == content.decision.chosen
        drawn += [
            row_name(name, left, beside=base - 6, above=base - 38, narrow=narrow, strong=strong),
            path(outline, f"area {classes[name]}", closed=True),
            line(x.start, base, x.end, base, "rule"),
        ]
        drawn += _percentile_marks(content.measurements.engines[name], x, base, classes[name])
    return picture(width, bottom + 44, "Distribution of the latencies of each engine", drawn)


def _latency_scale(samples: Iterable[NDArray[np.float64]], left: float, right: float) -> Scale:
    """From the fastest request to the slowest engine's p99.5; what lies beyond is in the samples."""
    ends = [(float(latency_ms.min()), float(np.quantile(latency_ms, 0.995))) for latency_ms in samples]
    lows, highs = zip(*ends, strict=True)
    return padded([min(lows), max(highs)], left, right, log=True, by=0.03)


def _density(latency_ms: NDArray[np.float64], x: Scale, *, step: float = 2.0) -> list[tuple[float, float]]:
    """(pixel, height in 0..1): a Gaussian kernel density in log latency, bandwidth by Silverman's rule."""
    at = x.start + (x.end - x.start) * np.log(latency_ms / x.low) / np.log(x.high / x.low)
    low, high = np.quantile(at, (0.25, 0.75))
    spread = min(float(at.std()), float(high - low) / 1.34) or float(at.std())
    bandwidth = max(1.2, 0.9 * spread * len(at) ** -0.2)
    first, last = max(x.start, at.min() - 3 * bandwidth), min(x.end, at.max() + 3 * bandwidth)
    grid = np.arange(first, last + step, step)
    counts, _ = np.histogram(at, bins=np.append(grid, grid[-1] + step) - step / 2)
    reach = int(np.ceil(4 * bandwidth / step))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * step / bandwidth) ** 2)
    heights = np.convolve(counts, kernel)[reach:-reach]
    shares = (heights / heights.max()).tolist()
    return list(zip(np.minimum(grid, x.end).tolist(), shares, strict=True))


def _percentile_marks(engine: EngineFigures, x: Scale, base: float, class_: str) -> list[Element]:
    """A stroke for each percentile, and its name where it would not stand in the name before it."""
    drawn = []
    free_from = x.start
    for figure, length in (("latency_ms_p50", 30), ("latency_ms_p90", 16), ("latency_ms_p99", 16)):
        interval: Interval | None = getattr(engine, figure)
        if interval is None or interval.value > x.high:
            continue
        at = x(interval.value)
        drawn.append(line(at, base - length, at, base + 4, f"mark {class_}"))
        if at - 11 >= free_from:
            drawn.append(label(figure[-3:], at, base + 15, "small", anchor="middle"))
            free_from = at + 11
    return drawn
