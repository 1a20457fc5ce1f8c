"""The roofline chart: what the machine allows at each arithmetic intensity, and where what ran is below it.

After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52 (2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from hpml.artifacts.peaks import PeaksSpec
from hpml.reporting.format import plain, shorten
from hpml.reporting.labels import Box, Mark, Segment, Spot, drawn_labels, place_labels
from hpml.reporting.svg import Scale, axes, dot, is_narrow, label, line, padded, path, picture, text_width

_LEFT, _TOP, _BOTTOM, _RIGHT = 60, 30, 48, 14
_MOST_AREAS_NAMED = 5  # the largest
_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
_DOT_PX = 5.0
_RING_PX = 3.0
_ALONG_PX = 10  # from the lower end of a slope to its name
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
    """The peaks of a device: GB/s of each level of its memory, Gflop/s of each precision."""

    bandwidths: dict[str, float]
    arithmetic: dict[str, float]


def roofline(
    peaks: PeaksSpec | None,
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
    roofs = _roofs(peaks, threads if device == "cpu" else 1, device) if peaks else _Roofs({}, {})
    shown = [point for point in points if point.flop_per_byte > 0 and point.gflop_per_s > 0]
    if not roofs.bandwidths or not roofs.arithmetic or not shown:
        return None
    narrow = is_narrow(width)
    height = 360 if narrow else 420
    x, y = _scales(roofs, shown, width, height)
    marks = _marks(shown, x, y, longest_name=22 if narrow else 30)
    ridges, lines, names = _drawn_roofs(roofs, x, y, marks)
    bounds = Box(_LEFT + 2, _TOP - 10, width - 2, height - _BOTTOM - 2)
    placed = place_labels(marks, lines, bounds, avoid=names)
    drawn = [*axes(x, y, "operations per byte moved (log scale)", "Gflop/s (log scale)"), *ridges]
    for mark, point in zip(marks, shown, strict=True):
        shape = "point" if point.share is None else "area"
        drawn.append(dot(mark.x, mark.y, mark.radius, f"{shape} {point.class_}"))
    drawn += drawn_labels(marks, placed, [point.class_ for point in shown])
    return picture(width, height, title, drawn)


def _roofs(peaks: PeaksSpec, threads: int, device: str) -> _Roofs:
    """The stable peaks, the fastest level of the memory first."""
    levels = dict.fromkeys(point.level for point in peaks.bandwidths if point.device == device)
    on: dict[str, Any] = {"threads": threads, "device": device}
    return _Roofs(
        {level: roof.rate for level in levels if (roof := peaks.bandwidth_roof(level, **on))},
        {name: roof.rate for name in _PRECISIONS if (roof := peaks.arithmetic_roof(name, **on))},
    )


def _scales(roofs: _Roofs, points: Sequence[Point], width: float, height: float) -> tuple[Scale, Scale]:
    """Both over all points and over the ridges, where slopes meet peaks."""
    ridges = [peak / slope for peak in roofs.arithmetic.values() for slope in roofs.bandwidths.values()]
    across = [*ridges, *(point.flop_per_byte for point in points)]
    along = [*roofs.arithmetic.values(), *(point.gflop_per_s for point in points)]
    return (
        padded(across, _LEFT, width - _RIGHT, log=True, by=0.04),
        padded(along, height - _BOTTOM, _TOP, log=True, by=0.04),
    )


def _drawn_roofs(
    roofs: _Roofs, x: Scale, y: Scale, marks: Sequence[Mark]
) -> tuple[list[Element], list[Segment], list[Box]]:
    """The slopes and the peaks with their names; where they run, and what their names cover."""
    drawn: list[Element] = []
    lines: list[Segment] = []
    names: list[Box] = []
    highest = max(roofs.arithmetic.values())
    steepest = max(roofs.bandwidths.values())
    for level, slope in roofs.bandwidths.items():
        start = max(x.low, y.low / slope)
        end = min(x.high, highest / slope)
        if start >= end:
            continue
        ends = (x(start), y(slope * start)), (x(end), y(slope * end))
        text = f"{level} {plain(slope)} GB/s"
        along, side = _free_stretch(text, *ends, names)
        drawn += [path(ends, "front"), _along(text, *ends, along, side)]
        lines.append(ends)
        names += _covered_along(text, *ends, along, side)
    for precision, peak in roofs.arithmetic.items():
        ends = (x(max(x.low, peak / steepest)), y(peak)), (x(x.high), y(peak))
        drawn.append(line(*ends[0], *ends[1], "front"))
        lines.append(ends)
        text = f"{precision} {plain(peak)} Gflop/s"
        at = _free_spot(text, *ends, marks, names)
        drawn.append(label(text, *at, "small name", anchor="end"))
        names.append(Box.of_text(text, *at, anchor="end"))
    return drawn, lines, names


def _free_spot(text: str, start: Spot, end: Spot, marks: Sequence[Mark], names: Sequence[Box]) -> Spot:
    """Where on a flat line its name ends and covers no mark and no other name; else at the right end."""
    width = text_width(text)
    ends_at = range(int(end[0]), int(start[0] + width), -20)
    spots = [(x, end[1] + below) for x in ends_at for below in (-5, 14)]
    for spot in spots:
        box = Box.of_text(text, *spot, anchor="end")
        if all(mark.gap(box) > 0 for mark in marks) and not any(box.overlaps(name) for name in names):
            return spot
    return end[0], end[1] - 5


def _free_stretch(text: str, start: Spot, end: Spot, names: Sequence[Box]) -> tuple[int, int]:
    """After how many pixels of a slope its name begins, and on which side, to cover no other name.

    The side is 1 above the slope and -1 below it; at the slope's lower end, above, if there is no such place.
    """
    for along in range(_ALONG_PX, max(_ALONG_PX + 1, int(math.dist(start, end) - text_width(text))), 20):
        for side in (1, -1):
            covered = _covered_along(text, start, end, along, side)
            if not any(box.overlaps(name) for box in covered for name in names):
                return along, side
    return _ALONG_PX, 1


def _along(text: str, start: Spot, end: Spot, along: int, side: int) -> Element:
    """Text on a slope; see `_free_stretch`."""
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    drawn = label(text, start[0] + along, start[1] + (-6 if side == 1 else 14), "small name")
    drawn.set("transform", f"rotate({angle:.1f} {start[0]:.1f} {start[1]:.1f})")
    return drawn


def _covered_along(text: str, start: Spot, end: Spot, along: int, side: int) -> list[Box]:
    """What `_along` covers, as small boxes in a row."""
    length = math.dist(start, end)
    step_x, step_y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    boxes = []
    for at in range(along, int(along + text_width(text)), 8):
        centre_x = start[0] + at * step_x + side * 10 * step_y
        centre_y = start[1] + at * step_y - side * 10 * step_x
        boxes.append(Box(centre_x - 6, centre_y - 6, centre_x + 6, centre_y + 6))
    return boxes


def _marks(points: Sequence[Point], x: Scale, y: Scale, *, longest_name: int) -> list[Mark]:
    """Where and how large each point is drawn, and its name; of points with an area the largest have one.

    The area is to the largest as their shares of the time are. A dot that another one covers is larger by a
    ring, so that both are seen.
    """
    largest = max((point.share or 0.0 for point in points), default=0.0)
    by_share = sorted(points, key=lambda point: -(point.share or 0.0))
    named = by_share if by_share[0].share is None else by_share[:_MOST_AREAS_NAMED]
    least, most = _AREA_PX
    marks: list[Mark] = []
    for index in reversed(range(len(points))):  # the last is drawn on top
        point = points[index]
        at = x(point.flop_per_byte), y(point.gflop_per_s)
        if point.share is None:
            over = [mark for mark in marks if math.dist(at, (mark.x, mark.y)) < mark.radius]
            radius = max((mark.radius + _RING_PX for mark in over), default=_DOT_PX)
        else:
            radius = max(least, most * math.sqrt(point.share / largest))
        marks.append(Mark(*at, radius, shorten(point.name, longest_name) if point in named else ""))
    return marks[::-1]
