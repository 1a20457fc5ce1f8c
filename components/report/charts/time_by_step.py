"""Where the time of the run went."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from hpml.components.report.content import StepCost
from hpml.reporting.format import duration, plain
from hpml.reporting.svg import is_narrow, label, node, picture, row_name, text_width


def time_by_step(steps: Sequence[StepCost], width: float) -> Element:
    """A bar a step, as long as it took, with its seconds and its peak memory."""
    narrow = is_narrow(width)
    pitch = 40 if narrow else 28
    left = 8.0 if narrow else 284.0
    longest = max(max(step.seconds for step in steps), 1e-3)
    texts = [f"{duration(step.seconds)} · {_memory(step)}" for step in steps]
    room = width - left - 18 - max(text_width(text) for text in texts)
    drawn: list[Element] = []
    for index, (step, text) in enumerate(zip(steps, texts, strict=True)):
        top = index * pitch + (18 if narrow else 4)
        name = f"{step.stage} {step.name}".strip()
        length = max(1.5, room * step.seconds / longest)
        drawn += [
            row_name(name, left, beside=top + 13, above=top - 4, narrow=narrow),
            node("rect", x=left, y=top, width=length, height=18, rx=2, class_="bar"),
            label(text, left + length + 8, top + 13),
        ]
    return picture(width, len(steps) * pitch + 6, "Seconds that each step of the run took", drawn)


def _memory(step: StepCost) -> str:
    return f"{plain(step.peak_rss_bytes / 1e9, significant=2)} GB" if step.peak_rss_bytes else "not measured"
