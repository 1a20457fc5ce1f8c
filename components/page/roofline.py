"""The roofline chart: what the machine allows at each arithmetic intensity, and where what ran is below it.

After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52 (2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from components.measurements import CeilingsSpec
from components.page.format import plain, shorten
from components.page.svg import (
    Box,
    Scale,
    dot,
    label,
    leader,
    line,
    padded,
    path,
    picture,
    place_labels,
    x_axis,
    y_axis,
)

_LEFT, _TOP, _BOTTOM, _RIGHT = 60, 30, 48, 14
_NARROW_PX = 500
_MOST_AREAS_NAMED = 5  # the largest
_DOT_PX = 5.0
_AREA_PX = (2.5, 13.0)  # radius of a share of 0, and of the largest


@dataclass(frozen=True)
class Point:
    """Something that ran. share: of the time, which its area is drawn by; None for a dot of one size."""

    name: str
    class_: str
    flop_per_byte: float
    gflop_per_s: float
    share: float | None = None


@dataclass(frozen=True)
class _Roofs:
    """The ceilings of a device: GB/s of each level of its memory, Gflop/s of each precision."""

    bandwidths: dict[str, float]
    peaks: dict[str, float]


def roofline(
    ceilings: CeilingsSpec,
    points: Sequence[Point],
    *,
    threads: int,
    title: str,
    width: float,
    device: str = "cpu",
) -> Element | None:
    """`points` under the roofs of `threads` threads of the CPU, or of the GPU ("cuda").

    None where there are no roofs or no points.
    """
    roofs = _roofs(ceilings, threads if device == "cpu" else 1, device)
    shown = [point for point in points if point.flop_per_byte > 0 and point.gflop_per_s > 0]
    if not roofs.bandwidths or not roofs.peaks or not shown:
        return None
    narrow = width <= _NARROW_PX
    height = 360 if narrow else 420
    x, y = _scales(roofs, shown, width, height)
    ridges, lines = _drawn_roofs(roofs, x, y)
    places = [(x(point.flop_per_byte), y(point.gflop_per_s)) for point in shown]
    drawn = [
        *x_axis(x, _TOP, height - _BOTTOM, "operations per byte moved (log scale)"),
        *y_axis(y, _LEFT, width - _RIGHT, "Gflop/s (log scale)"),
        *ridges,
        *(
            dot(*place, radius, f"{'point' if point.share is None else 'area'} {point.class_}")
            for place, radius, point in zip(places, _radii_px(shown), shown, strict=True)
        ),
        *_names(shown, places, lines, Box(_LEFT + 2, _TOP - 10, width - 2, height - _BOTTOM - 2), narrow),
    ]
    return picture(width, height, title, drawn)


def _roofs(ceilings: CeilingsSpec, threads: int, device: str) -> _Roofs:
    """The stable ceilings, the fastest level of the memory first."""
    levels = dict.fromkeys(point.level for point in ceilings.bandwidths if point.device == device)
    bandwidths = {level: ceilings.bandwidth_roof(level, threads=threads, device=device) for level in levels}
    peaks = {
        precision: ceilings.arithmetic_roof(precision, threads=threads, device=device)
        for precision in ("fp32", "fp16", "bf16", "int8")
    }
    return _Roofs(
        {name: roof.rate for name, roof in bandwidths.items() if roof is not None},
        {name: roof.rate for name, roof in peaks.items() if roof is not None},
    )


def _scales(roofs: _Roofs, points: Sequence[Point], width: float, height: float) -> tuple[Scale, Scale]:
    """Both over all points and over the ridges, where slopes meet peaks."""
    ridges = [peak / slope for peak in roofs.peaks.values() for slope in roofs.bandwidths.values()]
    x = padded(
        [*ridges, *(point.flop_per_byte for point in points)], _LEFT, width - _RIGHT, log=True, by=0.04
    )
    y = padded(
        [*roofs.peaks.values(), *(point.gflop_per_s for point in points)],
        height - _BOTTOM,
        _TOP,
        log=True,
        by=0.04,
    )
    return x, y


def _drawn_roofs(roofs: _Roofs, x: Scale, y: Scale) -> tuple[list[Element], list[Box]]:
    """The slopes and the peaks with their names, and where they run."""
    drawn: list[Element] = []
    lines: list[Box] = []
    highest = max(roofs.peaks.values())
    steepest = max(roofs.bandwidths.values())
    for level, slope in roofs.bandwidths.items():
        start = max(x.low, y.low / slope)
        end = min(x.high, highest / slope)
        if start >= end:
            continue
        ends = (x(start), y(slope * start)), (x(end), y(slope * end))
        drawn.append(path(ends, "front"))
        lines.append(Box.around(*ends))
        drawn.append(_along(f"{level} {plain(slope)} GB/s", *ends))
    for precision, peak in roofs.peaks.items():
        ends = (x(max(x.low, peak / steepest)), y(peak)), (x(x.high), y(peak))
        drawn.append(line(*ends[0], *ends[1], "front"))
        lines.append(Box.around(*ends))
        text = f"{precision} {plain(peak)} Gflop/s"
        drawn.append(label(text, ends[1][0], ends[1][1] - 5, "small name", anchor="end"))
    return drawn, lines


def _along(text: str, start: tuple[float, float], end: tuple[float, float]) -> Element:
    """Text on a slope, at its lower end."""
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    drawn = label(text, start[0] + 10, start[1] - 6, "small name")
    drawn.set("transform", f"rotate({angle:.1f} {start[0]:.1f} {start[1]:.1f})")
    return drawn


def _radii_px(points: Sequence[Point]) -> list[float]:
    """How large each point is drawn: its area is to the largest as their shares of the time are."""
    largest = max((point.share or 0.0 for point in points), default=0.0)
    least, most = _AREA_PX
    return [
        _DOT_PX if point.share is None else max(least, most * math.sqrt(point.share / largest))
        for point in points
    ]


def _names(
    points: Sequence[Point],
    places: Sequence[tuple[float, float]],
    lines: Sequence[Box],
    bounds: Box,
    narrow: bool,
) -> list[Element]:
    """Names beside the points; of points with an area, beside the largest."""
    order = sorted(range(len(points)), key=lambda index: -(points[index].share or 0.0))
    if points[order[0]].share is not None:
        order = order[:_MOST_AREAS_NAMED]
    texts = [shorten(points[index].name, 22 if narrow else 30) for index in order]
    boxes = place_labels([places[index] for index in order], texts, lines, bounds)
    drawn: list[Element] = []
    for index, text, box in zip(order, texts, boxes, strict=True):
        mark = leader(*places[index], box)
        if mark is not None:
            drawn.append(mark)
        drawn.append(label(text, (box.left + box.right) / 2, box.bottom - 4, "name", anchor="middle"))
    return drawn
