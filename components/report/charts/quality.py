"""The quality of each engine: against its latency, and on each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.components.report.content import Content
from hpml.reporting import svg
from hpml.reporting.format import shorten
from hpml.reporting.labels import Box, Mark, Segment, Spot, drawn_labels, place_labels

_DOT_PX, _RING_PX = 5, 9
_DARKEST = 0.4  # opacity under which the figure of a class can still be read
_NAME_CHARACTERS = 18  # of a class


def quality_against_latency(content: Content, classes: Mapping[str, str], width: float) -> Element | None:
    """Both intervals of each engine, the Pareto front, and the least quality that the goals allow.

    None where no latency is known.
    """
    narrow = svg.is_narrow(width)
    height = 340 if narrow else 400
    metric, figures = content.metric, _latencies_and_qualities(content)
    to_keep = content.measurements.engines[content.measurements.reference].quality.get(metric.name)
    if not figures or to_keep is None:
        return None
    least = metric.scale * metric.worst_allowed(to_keep.value, content.goals.max_quality_loss)
    x = svg.padded(svg.ends(latency for latency, _ in figures.values()), 48, width - 14, log=True)
    # Better is up, whatever the metric.
    bottom_and_top = (height - 48, 30) if metric.better == "higher" else (30, height - 48)
    y = svg.padded([*svg.ends(quality for _, quality in figures.values()), least], *bottom_and_top)
    points = {name: (x(latency.value), y(quality.value)) for name, (latency, quality) in figures.items()}
    front = _pareto_front(list(points.values()), right=x.end)
    drawn = [
        *svg.axes(x, y, "latency p50 at batch 1, ms (log scale)", metric.heading),
        svg.line(48, y(least), width - 14, y(least), "floor"),
        svg.path(front, "front"),
    ]
    lines: list[Segment] = [*pairwise(front)]
    for name, (latency, quality) in figures.items():
        at_x, at_y = points[name]
        across = ((x(latency.low), at_y), (x(latency.high), at_y))
        along = ((at_x, y(quality.low)), (at_x, y(quality.high)))
        drawn += [svg.line(*start, *end, f"whisker {classes[name]}") for start, end in (across, along)]
        lines += [across, along]
    chosen = content.decision.chosen if content.decision.chosen in points else None
    if chosen:
        drawn.append(svg.dot(*points[chosen], _RING_PX, f"ring {classes[chosen]}"))
    drawn += [svg.dot(*at, _DOT_PX, f"point {classes[name]}") for name, at in points.items()]
    length = 28 if narrow else 30
    marks = [
        Mark(*at, _RING_PX if name == chosen else _DOT_PX, shorten(name, length))
        for name, at in points.items()
    ]
    placed = place_labels(marks, lines, Box(50, 20, width - 2, height - 50))
    drawn += drawn_labels(marks, placed, [classes[name] for name in points], shorten(chosen or "", length))
    return svg.picture(
        width, height, f"{metric.label} against latency of each engine, with 95 % intervals", drawn
    )


def _latencies_and_qualities(content: Content) -> dict[str, tuple[Interval, Interval]]:
    """p50 in milliseconds and the metric as it is shown, of the engines that have both."""
    metric = content.metric

    def shown(figure: Interval) -> Interval:
        scale = metric.scale
        return Interval(value=scale * figure.value, low=scale * figure.low, high=scale * figure.high)

    return {
        name: (engine.latency_ms_p50, shown(engine.quality[metric.name]))
        for name, engine in content.measurements.engines.items()
        if engine.latency_ms_p50 and metric.name in engine.quality
    }


def _pareto_front(points: Sequence[Spot], *, right: float) -> list[Spot]:
    """The corners of a staircase, up to `right`: in pixels, faster is to the left and better is up."""
    corners: list[Spot] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners += [(x, corners[-1][1])] if corners else []
            corners.append((x, y))
    return [*corners, (right, corners[-1][1])]


# -------------------------------------------------------------------------------------------------- by class


def share_by_class(
    top1: Mapping[str, Sequence[float]], names: Sequence[str], chosen: str | None, width: float
) -> Element:
    """A row an engine, a column a class, the colour stronger where more is wrong."""
    narrow = svg.is_narrow(width)
    left, pitch = (0.0, 48.0) if narrow else (214.0, 30.0)
    column = (width - left) / len(names)
    texts = [shorten(name, _NAME_CHARACTERS) for name in names]
    upright = any(svg.text_width(text) > column - 6 for text in texts)
    top = 10 + (max(map(svg.text_width, texts)) if upright else 12)
    most_wrong = max(1 - share for shares in top1.values() for share in shares)
    drawn = [_heading(text, left + column * (at + 0.5), top - 8, upright) for at, text in enumerate(texts)]
    for row, (name, shares) in enumerate(top1.items()):
        base = top + pitch * row + (18 if narrow else 0)
        drawn.append(
            svg.row_name(name, left, beside=base + 18, above=base - 5, narrow=narrow, strong=name == chosen)
        )
        for at, share in enumerate(shares):
            opacity = _DARKEST * (1 - share) / most_wrong if most_wrong else 0.0
            drawn += _cell(share, opacity, left + column * at, base, column)
    return svg.picture(
        width, top + pitch * len(top1) + 4, "The share that each engine gets right of each class", drawn
    )


def _heading(text: str, x: float, y: float, upright: bool) -> Element:
    """The name of a class above its column, upwards where it is too long."""
    if not upright:
        return svg.label(text, x, y, anchor="middle")
    return svg.node("text", text=text, transform=f"translate({x + 4:.1f} {y:.1f}) rotate(-90)")


def _cell(share: float, opacity: float, x: float, y: float, width: float) -> list[Element]:
    shade = svg.node(
        "rect", x=x + 1, y=y, width=width - 2, height=26, rx=2, class_="bar", fill_opacity=f"{opacity:.3f}"
    )
    return [shade, svg.label(f"{100 * share:.0f}", x + width / 2, y + 17, anchor="middle")]
