"""Each engine as a point: its accuracy against its latency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.components.report.charts.common import Classes, ends
from hpml.components.report.content import Content
from hpml.reporting.format import shorten
from hpml.reporting.labels import Box, Mark, Segment, drawn_labels, place_labels
from hpml.reporting.svg import Scale, axes, dot, is_narrow, line, padded, path, picture

Point = tuple[float, float]

_DOT_PX, _RING_PX = 5, 9


def accuracy_against_latency(content: Content, classes: Classes, width: float) -> Element | None:
    """Both intervals of each engine, the Pareto front, and the least accuracy that the goals allow.

    None where no latency is known.
    """
    narrow = is_narrow(width)
    height = 340 if narrow else 400
    latency, accuracy = _latencies_and_accuracies(content)
    to_keep = content.measurements.engines[content.measurements.reference].accuracy_top1
    if not latency or to_keep is None:
        return None
    floor = 100 * (to_keep.value - content.goals.max_accuracy_drop)
    x = padded(ends(latency.values()), 48, width - 14, log=True)
    y = padded([*ends(accuracy.values()), floor], height - 48, 30)
    points = {name: (x(latency[name].value), y(accuracy[name].value)) for name in latency}
    whiskers = {name: _whiskers(points[name], latency[name], accuracy[name], x, y) for name in points}
    front = _pareto_front(list(points.values()), right=x.end)
    drawn = [
        *axes(x, y, "latency p50 at batch 1, ms (log scale)", "top-1 accuracy, %"),
        line(48, y(floor), width - 14, y(floor), "floor"),
        path(front, "front"),
    ]
    for name, segments in whiskers.items():
        drawn += [line(*start, *end, f"whisker {classes[name]}") for start, end in segments]
    chosen = content.decision.chosen if content.decision.chosen in points else None
    drawn += _dots(points, classes, chosen)
    lines: list[Segment] = [*pairwise(front), *(one for segments in whiskers.values() for one in segments)]
    length = 28 if narrow else 30
    marks = [
        Mark(*at, _RING_PX if name == chosen else _DOT_PX, shorten(name, length))
        for name, at in points.items()
    ]
    placed = place_labels(marks, lines, Box(50, 20, width - 2, height - 50))
    strong = shorten(chosen, length) if chosen else ""
    drawn += drawn_labels(marks, placed, [classes[name] for name in points], strong)
    return picture(width, height, "Accuracy against latency of each engine, with 95 % intervals", drawn)


def _latencies_and_accuracies(content: Content) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """p50 in milliseconds and top-1 in percent, of the engines that have both."""
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
    dots = [dot(x, y, _DOT_PX, f"point {classes[name]}") for name, (x, y) in points.items()]
    return [dot(*points[chosen], _RING_PX, f"ring {classes[chosen]}"), *dots] if chosen else dots
