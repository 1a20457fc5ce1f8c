"""The report in one screen of Markdown, for a page that shows no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.measurements import EngineFigures, Interval, MeasurementsSpec
from components.page.format import ABSENT, TIMES, bounds, megabytes, percent, plain

_COLUMNS = ("engine", "verdict", "top-1", "p50, ms", "p99, ms", "speed-up", "size")


def markdown(title: str, figures: Mapping[str, Any]) -> str:
    """The decision, and a table with a row an engine. figures: what `figures.json` holds."""
    chosen, nearest = figures["chosen"], figures["nearest"]
    headline = f"Chosen: **{_text(chosen)}**" if chosen else "No engine chosen"
    near = f" The nearest is {_text(nearest)}." if nearest and not chosen else ""
    measured = MeasurementsSpec.model_validate(figures["measurements"])
    rows = [
        _row(name, str(figures["verdicts"][name]["outcome"]), engine)
        for name, engine in measured.engines.items()
    ]
    table = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return "\n".join(
        [
            f"# {_text(title)}",
            "",
            f"{headline}. {_text(figures['reason'])}{near}",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
            "",
            f"Latencies at batch 1, with 95 % intervals; the speed-up is over {_text(measured.reference)}.",
            "",
        ]
    )


def _row(name: str, outcome: str, engine: EngineFigures) -> tuple[str, ...]:
    accuracy, speedup = engine.accuracy_top1, engine.speedup_vs_reference
    return (
        _text(name),
        outcome,
        percent(accuracy.value) if accuracy else ABSENT,
        _latency(engine.latency_ms_p50),
        _latency(engine.latency_ms_p99),
        f"{plain(speedup.value)}{TIMES}" if speedup else ABSENT,
        megabytes(engine.size_bytes) if engine.size_bytes else ABSENT,
    )


def _latency(interval: Interval | None) -> str:
    return f"{plain(interval.value)} ({bounds(interval)})" if interval else ABSENT


def _text(text: str) -> str:
    """`text` as Markdown and HTML show it: names come from outside."""
    flat = " ".join(text.split())
    return "".join(
        f"&#{ord(char)};" if char in "<>&|" else f"\\{char}" if char in "\\`*_[]#" else char for char in flat
    )
