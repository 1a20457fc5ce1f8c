"""The figures for programs: JSON as the measurements have them, CSV with a row an engine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.artifacts.metric import MetricFacts
from hpml.components.report.content import Content

INTERVALS = (
    "latency_ms_p50",
    "latency_ms_p90",
    "latency_ms_p99",
    "speedup_vs_reference",
    "speedup_vs_best_fp32",
)


def figures_json(content: Content) -> str:
    """Goals, decision, measurements, and the seconds of each step."""
    decision = content.decision
    return json.dumps(
        {
            "goals": content.goals.model_dump(mode="json"),
            "chosen": decision.chosen,
            "nearest": decision.nearest,
            "reason": decision.reason,
            "undecided": decision.undecided,
            "verdicts": {name: asdict(verdict) for name, verdict in decision.verdicts.items()},
            "measurements": content.measurements.model_dump(mode="json"),
            "steps": [asdict(step) for step in content.steps],
        },
        indent=1,
    )


def figures_csv(content: Content) -> str:
    """A row an engine, and one for each of its further operations; no figure, no text.

    An interval is three columns: the figure, `_low` and `_high`. A figure of one state of the cores has the
    state's name behind its own: latency_ms_p50_near. Goals, and so verdicts, are for the first operation.
    """
    measured, verdicts = content.measurements, content.decision.verdicts
    operations = {measured.operation: measured.engines}
    operations |= {name: one.engines for name, one in measured.operations.items()}
    figures = [
        (operation, name, engine) for operation, of in operations.items() for name, engine in of.items()
    ]
    batches = sorted({item.batch for _, _, engine in figures for item in engine.throughput})
    rows = [
        {
            "engine": name,
            "operation": operation,
            "verdict": verdicts[name].outcome if operation == measured.operation else "",
            **_row(engine, batches, measured.states, measured.metrics),
        }
        for operation, name, engine in figures
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({key: _harmless(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _row(
    engine: EngineFigures, batches: list[int], states: Sequence[CoreState], metrics: Sequence[MetricFacts]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{name: getattr(engine, name) for name in ("status", "target", "precision")},
        "methods": "+".join(engine.methods),
        **{name: getattr(engine, name) for name in ("size_bytes", "parameters", "macs")},
        **{name: getattr(engine.settings, name, None) for name in ("threads", "spinning")},
        **{name: getattr(engine, name) for name in ("samples", "round_spread")},
    }
    for metric in metrics:
        row |= _columns(metric.name, engine.quality.get(metric.name))
    for figure in INTERVALS:
        row |= _columns(figure, getattr(engine, figure))
    for state in states if len(states) > 1 else ():
        in_it = next((one for one in engine.states if one.state == state.name), None)
        for figure in ("latency_ms_p50", "speedup_vs_reference", "speedup_vs_best_fp32"):
            row |= _columns(f"{figure}_{state.name}", getattr(in_it, figure, None))
    measured = {item.batch: item.rows_per_s for item in engine.throughput}
    for batch in batches:
        row |= _columns(f"rows_per_s_batch_{batch}", measured.get(batch))
    return row | {"reason": engine.reason}


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    ends = (interval.value, interval.low, interval.high) if interval else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets a quote before it, as OWASP advises."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )
