"""Throughput by batch size, and what more of it costs in latency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.reporting.svg import axes, dot, ends, label, line, padded, path, picture, y_axis

_HEIGHT = 320


def throughput_by_batch(
    engines: Mapping[str, EngineFigures], classes: Mapping[str, str], unit: str, width: float
) -> Element:
    """What each engine does per second at each batch size, in `unit`; each has some."""
    batches = sorted({item.batch for engine in engines.values() for item in engine.throughput})
    x = {batch: 96 + (width - 158) * (index + 0.5) / len(batches) for index, batch in enumerate(batches)}
    rates = ends(item.rows_per_s for engine in engines.values() for item in engine.throughput)
    y = padded(rates, _HEIGHT - 48, 30, log=True)
    drawn = [
        *y_axis(y, 60, width - 14, f"{unit} per second (log scale)"),
        *(label(f"{batch}", at, _HEIGHT - 31, anchor="middle") for batch, at in x.items()),
        label("batch size", (60 + width - 14) / 2, _HEIGHT - 12, "axis", anchor="middle"),
    ]
    for name, engine in engines.items():
        points = [(x[item.batch], y(item.rows_per_s.value)) for item in engine.throughput]
        drawn.append(path(points, f"curve {classes[name]}"))
        for item, (at_x, at_y) in zip(engine.throughput, points, strict=True):
            low, high = y(item.rows_per_s.low), y(item.rows_per_s.high)
            drawn.append(line(at_x, low, at_x, high, f"whisker {classes[name]}"))
            drawn.append(dot(at_x, at_y, 3.5, f"point {classes[name]}"))
    return picture(width, _HEIGHT, "Throughput of each engine by batch size", drawn)


Along = Literal["batch size", "clients"]
Point = tuple[int, Interval, Interval]  # batch size or clients, milliseconds of a request, rows per second


def throughput_against_latency(
    engines: Mapping[str, EngineFigures], classes: Mapping[str, str], along: Along, unit: str, width: float
) -> Element | None:
    """A curve an engine, a point for each batch size or number of clients; None where none was measured."""
    points_of = _by_batch if along == "batch size" else _by_clients
    curves = {name: points for name, engine in engines.items() if (points := points_of(engine))}
    if not curves:
        return None
    everywhere = [point for points in curves.values() for point in points]
    x = padded(ends(latency_ms for _, latency_ms, _ in everywhere), 60, width - 14, log=True)
    y = padded(ends(rate for _, _, rate in everywhere), _HEIGHT - 48, 30, log=True)
    drawn = axes(x, y, "latency of a request, ms (log scale)", f"{unit} per second (log scale)")
    for name, points in curves.items():
        spots = [(x(latency_ms.value), y(rate.value)) for _, latency_ms, rate in points]
        drawn.append(path(spots, f"curve {classes[name]}"))
        for (setting, latency_ms, rate), (at_x, at_y) in zip(points, spots, strict=True):
            drawn += [
                line(x(latency_ms.low), at_y, x(latency_ms.high), at_y, f"whisker {classes[name]}"),
                line(at_x, y(rate.low), at_x, y(rate.high), f"whisker {classes[name]}"),
                dot(at_x, at_y, 3.5, f"point {classes[name]}"),
                label(str(setting), at_x, at_y - 8, "name small", anchor="middle"),
            ]
    return picture(width, _HEIGHT, f"Throughput against latency along the {along} of each engine", drawn)


def _by_batch(engine: EngineFigures) -> list[Point]:
    """A request of a batch takes batch / rate seconds: they come one after the other."""
    points = []
    for item in sorted(engine.throughput, key=lambda item: item.batch):
        rate, batch_ms = item.rows_per_s, 1e3 * item.batch
        latency_ms = Interval(value=batch_ms / rate.value, low=batch_ms / rate.high, high=batch_ms / rate.low)
        points.append((item.batch, latency_ms, rate))
    return points


def _by_clients(engine: EngineFigures) -> list[Point]:
    """p50 of the requests, of one row each."""
    return [
        (loop.clients, loop.latency_ms_p50, loop.requests_per_s)
        for loop in sorted(engine.concurrency, key=lambda loop: loop.clients)
        if loop.latency_ms_p50 is not None and loop.requests_per_s is not None
    ]
