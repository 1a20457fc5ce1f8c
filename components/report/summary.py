"""The report in one screen of Markdown, for a page that shows no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, OperationFigures
from hpml.artifacts.metric import MetricFacts
from hpml.measuring.goals import COMPLETION, Goals, metric_of
from hpml.reporting.costs import undisturbed
from hpml.reporting.format import ABSENT, TIMES, bounds, megabytes, plain, sentence
from hpml.reporting.measurement_tables import (
    NOT_MEASURED,
    best_rate,
    by_state,
    over_the_mixture,
    settings_of,
    why_absent,
)


def markdown(title: str, figures: Mapping[str, Any]) -> str:
    """The decision, and a table with a row an engine. figures: what `figures.json` holds."""
    chosen, nearest = figures["chosen"], figures["nearest"]
    headline = f"Chosen: **{_text(chosen)}**" if chosen else "No engine chosen"
    near = f" The nearest is {_text(nearest)}." if nearest and not chosen else ""
    measured = MeasurementsSpec.model_validate(figures["measurements"])
    metric = metric_of(Goals.model_validate(figures["goals"]), measured)
    columns = ("engine", "settings", "verdict", metric.label, "p50, ms", "p99, ms", "speed-up", "size")
    rows = [
        _row(name, str(figures["verdicts"][name]["outcome"]), engine, metric)
        for name, engine in measured.engines.items()
    ]
    table = [columns, ("---",) * len(columns), *rows]
    return "\n".join(
        [
            f"# {_text(title)}",
            "",
            f"{headline}. {_text(figures['reason'])}{near}",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
            "",
            *_operations(measured),
            f"Latencies at batch 1, with 95 % intervals; the speed-up is over {_text(measured.reference)}."
            f"{_conditions(measured)}",
            "",
            *_doubts(figures, measured),
        ]
    )


def _operations(measured: MeasurementsSpec) -> list[str]:
    """A table for each operation that the goals are not for."""
    lines = []
    for name, operation in measured.operations.items():
        columns = (f"operation {_text(name)}", "p50, ms", "p99, ms", "speed-up", f"{_text(operation.unit)}/s")
        rows = [
            (
                _text(engine),
                _figure(figures, "latency_ms_p50"),
                _figure(figures, "latency_ms_p99"),
                _figure(figures, "speedup_vs_reference", TIMES),
                _rate(operation, figures),
            )
            for engine, figures in operation.engines.items()
        ]
        table = [columns, ("---",) * len(columns), *rows]
        lines += [*(f"| {' | '.join(cells)} |" for cells in table), ""]
    return lines


def _rate(operation: OperationFigures, figures: EngineFigures) -> str:
    """The largest rate, and at which batch size."""
    if found := best_rate(operation, figures):
        interval, batch = found
        return f"{plain(interval.value)} ({bounds(interval)}) at batch {batch}"
    return NOT_MEASURED


def _conditions(measured: MeasurementsSpec) -> str:
    """What the figures are of, where it was noted."""
    mixed, conditions = over_the_mixture(measured), measured.conditions
    told = [f"p50 and speed-up are {mixed}" if mixed else ""]
    told.append(f"{undisturbed(conditions)} slices were undisturbed" if conditions.slices else "")
    return "".join(f" {sentence(one)}" for one in told if one)


def _doubts(figures: Mapping[str, Any], measured: MeasurementsSpec) -> list[str]:
    """What is not verified and not measured, and what completes it."""
    verdict = figures["verdicts"].get(figures["chosen"], {})
    told = [f"**Not verified:** {_text(goal)}." for goal in verdict.get("unverified", ())]
    if measured.incomplete:
        told.append(
            f"**Not all is measured:** {_text(measured.incomplete.removeprefix('not measured: '))}. "
            f"`{COMPLETION}`, with the name of the run for RUN, goes on where measuring stopped."
        )
    return [line for one in told for line in (one, "")]


def _row(name: str, outcome: str, engine: EngineFigures, metric: MetricFacts) -> tuple[str, ...]:
    return (
        _text(name),
        settings_of(engine) or ABSENT,
        outcome,
        metric.in_words(quality.value) if (quality := engine.quality.get(metric.name)) else ABSENT,
        _figure(engine, "latency_ms_p50"),
        _figure(engine, "latency_ms_p99"),
        _figure(engine, "speedup_vs_reference", TIMES),
        megabytes(engine.size_bytes) if engine.size_bytes else ABSENT,
    )


def _figure(engine: EngineFigures, figure: str, unit: str = "") -> str:
    """The figure with its interval and what it is in each state, or why there is none."""
    interval = getattr(engine, figure)
    if interval is None:
        return _text(why_absent(engine, figure)) or ABSENT
    if interval.low == interval.high:  # a ratio to itself
        return f"{plain(interval.value)}{unit}"
    states = "".join(f"; {state} {value}{unit}" for state, value in by_state(engine, figure))
    return f"{plain(interval.value)}{unit} ({bounds(interval)}){states}"


def _text(text: str) -> str:
    """`text` as Markdown and HTML show it: names come from outside."""
    flat = " ".join(text.split())
    return "".join(
        f"&#{ord(char)};" if char in "<>&|" else f"\\{char}" if char in "\\`*_[]#" else char for char in flat
    )
