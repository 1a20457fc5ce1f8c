"""What more throughput costs in latency: along batch sizes, or along the clients of a closed loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.components.report.charts.common import Classes, ends
from hpml.components.report.content import Content
from hpml.reporting.svg import Scale, axes, dot, label, line, padded, path, picture

Along = Literal["batch size", "clients"]


@dataclass(frozen=True)
class _Point:
    """What an engine does at one batch size, or with so many clients."""

    setting: int
    latency_ms: Interval
    images_per_s: Interval


def throughput_against_latency(
    content: Content, classes: Classes, along: Along, width: float
) -> Element | None:
    """A curve an engine, a point for each batch size or number of clients; None where none was measured."""
    settings = _by_batch if along == "batch size" else _by_clients
    curves = {name: settings(engine) for name, engine in content.measurements.engines.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    height = 320
    points = [point for of_engine in curves.values() for point in of_engine]
    x = padded(ends([point.latency_ms for point in points]), 60, width - 14, log=True)
    y = padded(ends([point.images_per_s for point in points]), height - 48, 30, log=True)
    drawn = [
        *axes(x, y, "latency of a request, ms (log scale)", "images per second (log scale)"),
    ]
    for name, of_engine in curves.items():
        drawn.append(path([_at(point, x, y) for point in of_engine], f"curve {classes[name]}"))
        for point in of_engine:
            drawn += _marks(point, x, y, classes[name])
    return picture(width, height, f"Throughput against latency along the {along} of each engine", drawn)


def _by_batch(engine: EngineFigures) -> list[_Point]:
    """A request of a batch takes batch / rate seconds: they come one after the other."""
    return [
        _Point(
            item.batch,
            Interval(
                value=1e3 * item.batch / item.images_per_s.value,
                low=1e3 * item.batch / item.images_per_s.high,
                high=1e3 * item.batch / item.images_per_s.low,
            ),
            item.images_per_s,
        )
        for item in sorted(engine.throughput, key=lambda item: item.batch)
    ]


def _by_clients(engine: EngineFigures) -> list[_Point]:
    """p50 of the requests, of one image each."""
    return [
        _Point(loop.clients, loop.latency_ms_p50, loop.requests_per_s)
        for loop in sorted(engine.concurrency, key=lambda loop: loop.clients)
        if loop.latency_ms_p50 is not None and loop.requests_per_s is not None
    ]


def _at(point: _Point, x: Scale, y: Scale) -> tuple[float, float]:
    return x(point.latency_ms.value), y(point.images_per_s.value)


def _marks(point: _Point, x: Scale, y: Scale, class_: str) -> list[Element]:
    """Both intervals, the dot, and the batch size or the number of clients above it."""
    at_x, at_y = _at(point, x, y)
    latency_ms, images_per_s = point.latency_ms, point.images_per_s
    return [
        line(x(latency_ms.low), at_y, x(latency_ms.high), at_y, f"whisker {class_}"),
        line(at_x, y(images_per_s.low), at_x, y(images_per_s.high), f"whisker {class_}"),
        dot(at_x, at_y, 3.5, f"point {class_}"),
        label(str(point.setting), at_x, at_y - 8, "name small", anchor="middle"),
    ]
