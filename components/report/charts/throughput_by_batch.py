"""Images per second of each engine at each batch size."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from hpml.artifacts.measurements import EngineFigures
from hpml.components.report.charts.common import Classes, ends
from hpml.reporting.svg import dot, label, line, padded, path, picture, y_axis


def throughput_by_batch(engines: Mapping[str, EngineFigures], classes: Classes, width: float) -> Element:
    """Images per second of each engine at each batch size; each has some."""
    height = 320
    batches = sorted({item.batch for engine in engines.values() for item in engine.throughput})
    x = {batch: 96 + (width - 158) * (index + 0.5) / len(batches) for index, batch in enumerate(batches)}
    y = padded(
        ends([item.images_per_s for engine in engines.values() for item in engine.throughput]),
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
