"""What the steps of the run took, and how the trainings among them went."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from hpml.components.report.content import StepCost, Training
from hpml.reporting import svg
from hpml.reporting.format import duration, plain


def time_by_step(steps: Sequence[StepCost], width: float) -> Element:
    """A bar a step, as long as it took, with its seconds and its peak memory."""
    narrow = svg.is_narrow(width)
    pitch, left = (40, 8.0) if narrow else (28, 284.0)
    longest = max(max(step.seconds for step in steps), 1e-3)
    texts = [f"{duration(step.seconds)} · {_memory(step)}" for step in steps]
    room = width - left - 18 - max(map(svg.text_width, texts))
    drawn: list[Element] = []
    for index, (step, text) in enumerate(zip(steps, texts, strict=True)):
        top = index * pitch + (18 if narrow else 4)
        name = f"{step.stage} {step.name}".strip()
        length = max(1.5, room * step.seconds / longest)
        drawn += [
            svg.row_name(name, left, beside=top + 13, above=top - 4, narrow=narrow),
            svg.node("rect", x=left, y=top, width=length, height=18, rx=2, class_="bar"),
            svg.label(text, left + length + 8, top + 13),
        ]
    return svg.picture(width, len(steps) * pitch + 6, "Seconds that each step of the run took", drawn)


def _memory(step: StepCost) -> str:
    return f"{plain(step.peak_rss_bytes / 1e9, significant=2)} GB" if step.peak_rss_bytes else "not measured"


def training_curves(
    trainings: Sequence[Training], colours: Sequence[str], key: str, title: str, scale: float, width: float
) -> Element | None:
    """`key` of each training, times `scale`, over its epochs; None where no training has it."""
    curves = [
        (curve, colour)
        for training, colour in zip(trainings, colours, strict=True)
        if (curve := training.curve(key))
    ]
    if not curves:
        return None
    height = 260
    values = [scale * value for curve, _ in curves for _, value in curve]
    epochs = [epoch for curve, _ in curves for epoch, _ in curve]
    x = svg.Scale(min(epochs) - 0.25, max(epochs) + 0.25, 48, width - 12)
    wide_range = min(values) > 0 and max(values) / min(values) > 20
    y = svg.padded(values, height - 46, 30, log=wide_range)
    drawn = [
        *svg.x_axis(x, 30, height - 46, "epoch", whole=True),
        *svg.y_axis(y, 48, width - 12, title + (" (log scale)" if wide_range else "")),
    ]
    for curve, colour in curves:
        points = [(x(epoch), y(scale * value)) for epoch, value in curve]
        drawn.append(svg.path(points, f"curve {colour}"))
        if len(points) <= 20:
            drawn += [svg.dot(at_x, at_y, 2.5, f"point {colour}") for at_x, at_y in points]
    return svg.picture(width, height, f"{title} by epoch", drawn)
