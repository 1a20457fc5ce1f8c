"""The page: what was chosen and why, the figures, the pictures, and what they depend on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from hpml.components.report import charts, diagnosis, tables
from hpml.components.report.content import Content
from hpml.core.errors import Terminated
from hpml.measuring.goals import COMPLETION
from hpml.reporting import rendering
from hpml.reporting.colours import colour_classes, colour_of_training

# What a part is called where it cannot be drawn, and its macro.
_PARTS = {
    "The choice": "choice",
    "The engines": "figures",
    "Further operations": "operations",
    "Why it is not faster": "diagnosed",
    "Quality against latency": "quality_against_latency",
    "Quality": "quality",
    "How the latencies are distributed": "latencies",
    "Latency over the time of the run": "over_the_run",
    "Throughput": "throughput",
    "Scenarios": "scenarios",
    "Start, memory, energy": "start_and_memory",
    "Training and fine-tuning": "training",
    "Where the time went": "time",
    "What was exported": "exported",
    "What this machine can do at most": "machine",
    "Data and machine": "environment",
    "How to read this": "reading",
}


def title_of(content: Content) -> str:
    """One line that says what the report found."""
    chosen = content.decision.chosen
    return f"{chosen} was chosen" if chosen else "No engine meets the goals"


def page(content: Content, tell: Callable[[str], None] = lambda _: None) -> str:
    """The whole HTML document. In place of a part that cannot be drawn is a note, which `tell` gets, too."""
    template = parts_of(content)
    parts = [_drawn(title, template, macro, tell) for title, macro in _PARTS.items()]
    return rendering.render("reporting/templates/page.html", title=title_of(content), parts=parts)


def parts_of(content: Content) -> Any:
    """The parts of the page as functions, by the names in the template."""
    reference = content.measurements.reference
    classes = colour_classes(content.measurements.engines, reference=reference)
    colours = [colour_of_training(one.names, classes, reference=reference) for one in content.trainings]
    names = [", ".join(one.names) for one in content.trainings]
    return rendering.macros(
        "components/report/templates/report.html",
        content=content,
        title=title_of(content),
        classes=classes,
        colours=colours,
        trainings=dict(zip(names, colours, strict=True)),
        completion=COMPLETION,
        charts=charts,
        diagnosing=diagnosis,
        tables=tables,
    )


def _drawn(title: str, template: Any, macro: str, tell: Callable[[str], None]) -> Any:
    try:
        return getattr(template, macro)()
    except Terminated:
        raise
    except Exception as error:  # a figure that nobody foresaw: it is no reason to show none
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        tell(f'"{title}" could not be drawn and is left out of the report: {reason}')
        return template.undrawn(title, reason)
