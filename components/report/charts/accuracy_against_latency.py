"""Each engine as a point: its accuracy against its latency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from components.measurements import Interval
from components.page.format import shorten
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
from components.report.charts.common import NARROW_PX, Classes, ends
from components.report.content import Content

Point = tuple[float, float]


def accuracy_against_latency(content: Content, classes: Classes, width: float) -> Element:
    """Both intervals of each engine, the Pareto front, and the least accuracy that the goals allow."""
    height = 400 if width > NARROW_PX else 340
    latency, accuracy = _latencies_and_accuracies(content)
    floor = accuracy[content.measurements.reference].value - 100 * content.goals.max_accuracy_drop
    x = padded(ends(latency.values()), 48, width - 14, log=True)
    y = padded([*ends(accuracy.values()), floor], height - 48, 30)
    points = {name: (x(latency[name].value), y(accuracy[name].value)) for name in latency}
    whiskers = {name: _whiskers(points[name], latency[name], accuracy[name], x, y) for name in points}
    front = _pareto_front(list(points.values()), right=x.end)
    drawn = [
        *x_axis(x, 30, height - 48, "latency p50 at batch 1, ms (log scale)"),
        *y_axis(y, 48, width - 14, "top-1 accuracy, %"),
        line(48, y(floor), width - 14, y(floor), "floor"),
        path(front, "front"),
    ]
    for name, segments in whiskers.items():
        drawn += [line(*start, *end, f"whisker {classes[name]}") for start, end in segments]
    drawn += _dots(points, classes, content.decision.chosen)
    lines = [*pairwise(front), *(segment for segments in whiskers.values() for segment in segments)]
    bounds = Box(50, 20, width - 2, height - 50)
    drawn += _names(points, lines, bounds, 30 if width > NARROW_PX else 28, content.decision.chosen)
    return picture(width, height, "Accuracy against latency of each engine, with 95 % intervals", drawn)


def _latencies_and_accuracies(content: Content) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """p50 in milliseconds and top-1 in percent, of the measured engines."""
    latency, accuracy = {}, {}
    for name, engine in content.measurements.engines.items():
        if engine.latency_ms_p50 is not None and engine.accuracy_top1 is not None:
            share = engine.accuracy_top1
            latency[name] = engine.latency_ms_p50
            accuracy[name] = Interval(value=100 * share.value, low=100 * share.low, high=100 * share.high)
    return latency, accuracy


def _whiskers(
    point: Point, latency: Interval, accuracy: Interval, x: Scale, y: Scale
) -> list[tuple[Point, Point]]:
    at_x, at_y = point
    return [
        ((x(latency.low), at_y), (x(latency.high), at_y)),
        ((at_x, y(accuracy.low)), (at_x, y(accuracy.high))),
    ]


def _pareto_front(points: Sequence[Point], *, right: float) -> list[Point]:
    """The corners of a staircase, up to `right`: in pixels, faster is to the left and better is up."""
    corners: list[Point] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners += [(x, corners[-1][1])] if corners else []
            corners.append((x, y))
    return [*corners, (right, corners[-1][1])]


def _dots(points: dict[str, Point], classes: Classes, chosen: str | None) -> list[Element]:
    dots = [dot(x, y, 5, f"point {classes[name]}") for name, (x, y) in points.items()]
    return [dot(*points[chosen], 9, f"ring {classes[chosen]}"), *dots] if chosen else dots


def _names(
    points: dict[str, Point],
    lines: Sequence[tuple[Point, Point]],
    bounds: Box,
    length: int,
    chosen: str | None,
) -> list[Element]:
    """The name of each point, `length` characters at most, and thin lines to those that are not beside it."""
    texts = [shorten(name, length) for name in points]
    boxes = place_labels(list(points.values()), texts, [Box.around(*segment) for segment in lines], bounds)
    leaders = [leader(*point, box) for point, box in zip(points.values(), boxes, strict=True)]
    drawn = [mark for mark in leaders if mark is not None]
    for name, text, box in zip(points, texts, boxes, strict=True):
        class_ = "name strong" if name == chosen else "name"
        drawn.append(label(text, (box.left + box.right) / 2, box.bottom - 4, class_, anchor="middle"))
    return drawn
