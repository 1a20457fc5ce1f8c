"""The pictures. Each is drawn for a given width, once for a desktop and once for a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

import numpy as np

from components.artifacts import EngineFigures, Interval
from components.report.content import Content, StepCost, Training
from components.report.format import duration, plain, shorten
from components.report.markup import node
from components.report.svg import (
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
    text_width,
    x_axis,
    y_axis,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Classes = dict[str, str]  # engine -> CSS class of its colour

_NARROW = 500  # below it, a row's name stands above the row instead of to its left


# ------------------------------------------------------------------------------- accuracy against latency


def accuracy_against_latency(content: Content, classes: Classes, width: float) -> Element:
    """Each engine as a point with both intervals, the Pareto front, the least accuracy the goals allow."""
    height = 400 if width > _NARROW else 340
    latency, accuracy = _latencies_and_accuracies(content)
    floor = accuracy[content.measurements.reference].value - 100 * content.goals.max_accuracy_drop
    x = padded(_ends(latency.values()), 48, width - 14, log=True)
    y = padded([*_ends(accuracy.values()), floor], height - 48, 30)
    points = {name: (x(latency[name].value), y(accuracy[name].value)) for name in latency}
    whiskers = [
        mark
        for name, (at_x, at_y) in points.items()
        for mark in (
            line(x(latency[name].low), at_y, x(latency[name].high), at_y, f"whisker {classes[name]}"),
            line(at_x, y(accuracy[name].low), at_x, y(accuracy[name].high), f"whisker {classes[name]}"),
        )
    ]
    front = _staircase(list(points.values()), right=x.end)
    crossed = [_line_box(mark) for mark in whiskers] + [
        Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)) for (x1, y1), (x2, y2) in pairwise(front)
    ]
    drawn = [
        *x_axis(x, 30, height - 48, "latency p50 at batch 1, ms (log scale)"),
        *y_axis(y, 48, width - 14, "top-1 accuracy, %"),
        line(48, y(floor), width - 14, y(floor), "floor"),
        path(front, "front"),
        *whiskers,
    ]
    for name, (at_x, at_y) in points.items():
        if name == content.decision.chosen:
            drawn.append(dot(at_x, at_y, 9, f"ring {classes[name]}"))
        drawn.append(dot(at_x, at_y, 5, f"point {classes[name]}"))
    bounds = Box(50, 20, width - 2, height - 50)
    drawn += _names_beside(points, crossed, bounds, 30 if width > _NARROW else 28, content.decision.chosen)
    return picture(width, height, "Accuracy against latency of each engine, with 95 % intervals", drawn)


def _names_beside(
    points: dict[str, tuple[float, float]], lines: list[Box], bounds: Box, length: int, chosen: str | None
) -> list[Element]:
    texts = [shorten(name, length) for name in points]
    boxes = place_labels(list(points.values()), texts, lines, bounds)
    leaders = [leader(*point, box) for point, box in zip(points.values(), boxes, strict=True)]
    drawn = [mark for mark in leaders if mark is not None]
    for name, text, box in zip(points, texts, boxes, strict=True):
        class_ = "name strong" if name == chosen else "name"
        drawn.append(label(text, (box.left + box.right) / 2, box.bottom - 4, class_, anchor="middle"))
    return drawn


def _latencies_and_accuracies(content: Content) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """p50 in milliseconds and top-1 in percent, of the measured engines."""
    latency, accuracy = {}, {}
    for name, engine in content.measurements.engines.items():
        if engine.latency_ms_p50 is not None and engine.accuracy_top1 is not None:
            share = engine.accuracy_top1
            latency[name] = engine.latency_ms_p50
            accuracy[name] = Interval(value=100 * share.value, low=100 * share.low, high=100 * share.high)
    return latency, accuracy


def _line_box(mark: Element) -> Box:
    x1, y1, x2, y2 = (float(str(mark.get(name))) for name in ("x1", "y1", "x2", "y2"))
    return Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))


def _ends(intervals: Iterable[Interval]) -> list[float]:
    return [end for interval in intervals for end in (interval.low, interval.high)]


def _staircase(points: Sequence[tuple[float, float]], *, right: float) -> list[tuple[float, float]]:
    """The Pareto front of points in pixels, to the left and up is better, as corners up to `right`."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners += [(x, corners[-1][1])] if corners else []
            corners.append((x, y))
    return [*corners, (right, corners[-1][1])]


# ----------------------------------------------------------------------------------- latency distributions


def latency_distributions(content: Content, classes: Classes, width: float) -> Element:
    """The density of each engine's latencies over a common log axis, p50, p90 and p99 marked."""
    rows = _Rows(width, len(content.latency_ms), row_height=56)
    x = _latency_scale(list(content.latency_ms.values()), rows)
    drawn = x_axis(x, rows.top, rows.bottom, "latency at batch 1, ms (log scale)")
    for index, (name, latency_ms) in enumerate(content.latency_ms.items()):
        base = rows.baseline(index)
        density = _density(latency_ms, x)
        outline = [(at, base - 30 * value) for at, value in density]
        drawn += rows.name(index, name, strong=name == content.decision.chosen)
        drawn += [
            path(
                [(outline[0][0], base), *outline, (outline[-1][0], base)],
                f"area {classes[name]}",
                closed=True,
            ),
            line(x.start, base, x.end, base, "rule"),
        ]
        drawn += _percentile_marks(content.measurements.engines[name], x, base, classes[name])
    return picture(width, rows.height, "Distribution of the latencies of each engine", drawn)


def _latency_scale(samples: Sequence[NDArray[np.float64]], rows: _Rows) -> Scale:
    """From the fastest request to the slowest engine's p99.5; what lies beyond is in the samples."""
    low = min(float(latency_ms.min()) for latency_ms in samples)
    high = max(float(np.quantile(latency_ms, 0.995)) for latency_ms in samples)
    return padded([low, high], rows.left, rows.right, log=True, by=0.03)


def _density(latency_ms: NDArray[np.float64], x: Scale, *, step: float = 2.0) -> list[tuple[float, float]]:
    """(pixel, height in 0..1): a Gaussian kernel density in log latency, bandwidth by Silverman's rule."""
    at = x.start + (x.end - x.start) * np.log(latency_ms / x.low) / np.log(x.high / x.low)
    low, high = np.quantile(at, (0.25, 0.75))
    spread = min(float(at.std()), float(high - low) / 1.34) or float(at.std())
    bandwidth = max(1.2, 0.9 * spread * len(at) ** -0.2)
    grid = np.arange(
        max(x.start, at.min() - 3 * bandwidth), min(x.end, at.max() + 3 * bandwidth) + step, step
    )
    counts, _ = np.histogram(at, bins=np.append(grid - step / 2, grid[-1] + step / 2))
    kernel = np.exp(-0.5 * (np.arange(-40, 41) * step / bandwidth) ** 2)
    heights = np.convolve(counts, kernel, mode="full")[40:-40]
    return [
        (float(min(px, x.end)), float(value)) for px, value in zip(grid, heights / heights.max(), strict=True)
    ]


def _percentile_marks(engine: EngineFigures, x: Scale, base: float, class_: str) -> list[Element]:
    marks = []
    for figure, length in (("latency_ms_p50", 30), ("latency_ms_p90", 16), ("latency_ms_p99", 16)):
        interval: Interval | None = getattr(engine, figure)
        if interval is not None and interval.value <= x.high:
            at = x(interval.value)
            marks.append(line(at, base - length, at, base + 4, f"mark {class_}"))
            marks.append(label(figure[-3:], at, base + 15, "small", anchor="middle"))
    return _without_collisions(marks)


def _without_collisions(marks: Sequence[Element]) -> list[Element]:
    """The marks, less the text that would stand in the text before it."""
    kept: list[Element] = []
    free_from = -1e9
    for mark in marks:
        if mark.tag == "text":
            at = float(str(mark.get("x")))
            if at - 11 < free_from:
                continue
            free_from = at + 11
        kept.append(mark)
    return kept


class _Rows:
    """Horizontal rows over one x axis, with a name each: to the left, or above where it is narrow."""

    def __init__(self, width: float, count: int, *, row_height: float) -> None:
        self.narrow = width <= _NARROW
        self.pitch = row_height + (18 if self.narrow else 0)
        self.left, self.right = (8.0 if self.narrow else 214.0), width - 14
        self.top = 4.0
        self.bottom = self.top + self.pitch * count + 6
        self.height = self.bottom + 44

    def baseline(self, index: int) -> float:
        """Where the things of a row stand on."""
        return self.top + self.pitch * (index + 1) - 16

    def name(self, index: int, text: str, *, strong: bool = False) -> list[Element]:
        """The name of a row."""
        class_ = "name strong" if strong else "name"
        if self.narrow:
            return [label(shorten(text, 44), self.left, self.baseline(index) - 38, class_)]
        return [label(shorten(text, 30), self.left - 14, self.baseline(index) - 6, class_, anchor="end")]


# ------------------------------------------------------------------------------------------ training curves


def training_curves(
    trainings: Sequence[Training],
    colours: Sequence[str],
    key: str,
    title: str,
    width: float,
    *,
    scale: float = 1,
) -> Element | None:
    """`key` of each training, times `scale`, over its epochs; None where no training has it."""
    curves = [(training.curve(key), colour) for training, colour in zip(trainings, colours, strict=True)]
    curves = [(curve, colour) for curve, colour in curves if curve]
    if not curves:
        return None
    height = 260
    values = [scale * value for curve, _ in curves for _, value in curve]
    epochs = [epoch for curve, _ in curves for epoch, _ in curve]
    x = Scale(min(epochs) - 0.25, max(epochs) + 0.25, 48, width - 12)
    wide_range = min(values) > 0 and max(values) / min(values) > 20
    y = padded(values, height - 46, 30, log=wide_range)
    drawn = [
        *x_axis(x, 30, height - 46, "epoch"),
        *y_axis(y, 48, width - 12, title + (" (log scale)" if wide_range else "")),
    ]
    for curve, colour in curves:
        points = [(x(epoch), y(scale * value)) for epoch, value in curve]
        drawn.append(path(points, f"curve {colour}"))
        if len(points) <= 20:
            drawn += [dot(at_x, at_y, 2.5, f"point {colour}") for at_x, at_y in points]
    return picture(width, height, f"{title} by epoch", drawn)


# ----------------------------------------------------------------------------------------------- throughput


def throughput_by_batch(content: Content, classes: Classes, width: float) -> Element | None:
    """Images per second of each engine at each batch size; None where none was measured."""
    engines = {name: e for name, e in content.measurements.engines.items() if e.throughput}
    if not engines:
        return None
    height = 320
    batches = sorted({item.batch for engine in engines.values() for item in engine.throughput})
    x = {batch: 96 + (width - 158) * (index + 0.5) / len(batches) for index, batch in enumerate(batches)}
    y = padded(
        _ends([item.images_per_s for engine in engines.values() for item in engine.throughput]),
        height - 48,
        30,
        log=True,
    )
    drawn = y_axis(y, 60, width - 14, "images per second (log scale)")
    for batch, at in x.items():
        drawn.append(label(f"{batch}", at, height - 31, anchor="middle"))
    drawn.append(label("batch size", (60 + width - 14) / 2, height - 12, "axis", anchor="middle"))
    for name, engine in engines.items():
        points = [(x[item.batch], y(item.images_per_s.value)) for item in engine.throughput]
        drawn.append(path(points, f"curve {classes[name]}"))
        for item, (at_x, at_y) in zip(engine.throughput, points, strict=True):
            low, high = y(item.images_per_s.low), y(item.images_per_s.high)
            drawn += [
                line(at_x, low, at_x, high, f"whisker {classes[name]}"),
                dot(at_x, at_y, 3.5, f"point {classes[name]}"),
            ]
    return picture(width, height, "Throughput of each engine by batch size", drawn)


# ------------------------------------------------------------------------------------ where the time went


def time_by_step(steps: Sequence[StepCost], width: float) -> Element:
    """A bar a step, as long as it took, with its seconds and its peak memory."""
    narrow = width <= _NARROW
    pitch = 40 if narrow else 28
    left = 8.0 if narrow else 284.0
    longest = max(max(step.seconds for step in steps), 1e-3)
    texts = [
        f"{duration(step.seconds)} · {plain(step.peak_rss_bytes / 1e9, significant=2)} GB" for step in steps
    ]
    room = width - left - 18 - max(text_width(text) for text in texts)
    drawn: list[Element] = []
    for index, (step, text) in enumerate(zip(steps, texts, strict=True)):
        top = index * pitch + (18 if narrow else 4)
        name = shorten(f"{step.stage} {step.name}".strip(), 40)
        if narrow:
            drawn.append(label(name, left, top - 4, "name"))
        else:
            drawn.append(label(name, left - 14, top + 13, "name", anchor="end"))
        length = max(1.5, room * step.seconds / longest)
        drawn += [
            node("rect", x=left, y=top, width=length, height=18, rx=2, class_="bar"),
            label(text, left + length + 8, top + 13),
        ]
    return picture(width, len(steps) * pitch + 6, "Seconds that each step of the run took", drawn)
