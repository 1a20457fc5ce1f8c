"""How a figure of each training developed over its epochs."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from hpml.components.report.content import Training
from hpml.reporting.svg import Scale, dot, padded, path, picture, x_axis, y_axis


def training_curves(
    trainings: Sequence[Training],
    colours: Sequence[str],
    key: str,
    title: str,
    scale: float,
    width: float,
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
        *x_axis(x, 30, height - 46, "epoch", whole=True),
        *y_axis(y, 48, width - 12, title + (" (log scale)" if wide_range else "")),
    ]
    for curve, colour in curves:
        points = [(x(epoch), y(scale * value)) for epoch, value in curve]
        drawn.append(path(points, f"curve {colour}"))
        if len(points) <= 20:
            drawn += [dot(at_x, at_y, 2.5, f"point {colour}") for at_x, at_y in points]
    return picture(width, height, f"{title} by epoch", drawn)
