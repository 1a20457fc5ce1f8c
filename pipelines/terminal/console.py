"""What the terminal shows: progress of a run on stderr, tables on stdout. Plain lines off a terminal."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, OperationFigures
from hpml.artifacts.metric import MetricFacts
from hpml.measuring.goals import Decision
from hpml.pipelines.engine.run_record import StepRecord
from hpml.reporting.costs import undisturbed
from hpml.reporting.measurement_tables import (
    NOT_MEASURED,
    best_rate,
    by_state,
    over_the_mixture,
    settings_of,
    why_absent,
)

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)

_PLAIN_EVERY_S = 10.0
_NAME_WIDTH = 20  # what the other columns leave of 80
_FIGURES = {
    "latency_ms_p50": 3,  # decimals
    "latency_ms_p99": 3,
    "speedup_vs_reference": 2,
    "speedup_vs_best_fp32": 2,
}
_LATENCY_COLUMNS = ("p50 ms", "p99 ms", "x eager", "x fp32")
_COLUMNS = ("MB", *_LATENCY_COLUMNS)
_NOT_MEASURED = NOT_MEASURED.replace(" ", "\n")  # in a narrow cell
_ENDINGS = {"done": "green", "cached": "cyan", "failed": "red", "blocked": "yellow", "interrupted": "yellow"}


class PlainWatcher:
    """A line for each thing that happens, and one now and then for a long step."""

    def __init__(self) -> None:
        self._told_at_s: dict[str, float] = {}

    def step_changed(self, name: str, record: StepRecord) -> None:
        """A line."""
        self._told_at_s[name] = time.monotonic()
        err.print(_ending(name, record) or f"{escape(name)}: {record.status}", soft_wrap=True)

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        """A line, if the last one about this step is old enough."""
        now = time.monotonic()
        if now - self._told_at_s.get(name, 0.0) >= _PLAIN_EVERY_S:
            self._told_at_s[name] = now
            counts = f"{event['done']}/{event['total']} {event['unit']}"
            err.print(escape(f"{name}: {counts} {event['note']}".rstrip()), soft_wrap=True)

    def say(self, text: str) -> None:
        """A line."""
        err.print(escape(text), soft_wrap=True)


class LiveWatcher(PlainWatcher):
    """A bar for each running step, on a terminal, and lines above the bars."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def step_changed(self, name: str, record: StepRecord) -> None:
        """A bar appears when a step starts; a line stays when it has ended."""
        if record.status == "running":
            self._tasks[name] = self._progress.add_task(escape(name), total=None, note="")
            return
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))
        line = _ending(name, record)
        if line:
            err.print(line, soft_wrap=True)

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        """Move the bar."""
        if name in self._tasks:
            self._progress.update(
                self._tasks[name],
                completed=event["done"],
                total=event["total"],
                note=escape(str(event["note"])),
            )


@contextmanager
def watcher() -> Iterator[PlainWatcher]:
    """What shows a run: bars on a terminal, plain lines elsewhere."""
    if not err.is_terminal:
        yield PlainWatcher()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        yield LiveWatcher(progress)


def _ending(name: str, record: StepRecord) -> str:
    """The line about a step that ended; empty while it has not."""
    if record.status not in _ENDINGS:
        return ""
    told = f"[{_ENDINGS[record.status]}]{record.status}[/] {escape(name)}"
    if record.status == "done":
        return f"{told} [dim]{record.seconds:.1f} s[/]"
    return f"{told}: {escape(record.error)}" if record.status == "failed" else told


# ----------------------------------------------------------------------------------------------------- tables


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A table on stdout; `right` are the columns aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    out.print(table)


def print_variants(measured: MeasurementsSpec, decision: Decision) -> None:
    """The variants of a run on stdout, each figure above its 95 % interval; fits 80 columns.

    A further table for each operation that the goals are not for.
    """
    metric = measured.metrics[0]
    table = _table("variant", _heading(metric), *_COLUMNS)
    for name, figures in measured.engines.items():
        if figures.status != "not built":
            settings = textwrap.fill(settings_of(figures), _NAME_WIDTH)
            told = Text(f"{_label(name)}\n") + _verdict(decision, name)
            cells = [_dim_below(cell) for cell in _cells(figures, metric)]
            table.add_row(told + Text(f"\n{settings}" if settings else "", style="dim"), *cells)
    out.print(table)
    for operation, of in measured.operations.items():
        table = _table(operation, *_LATENCY_COLUMNS, f"{of.unit}/s")
        for name, figures in of.engines.items():
            table.add_row(_label(name), *(_dim_below(cell) for cell in _operation_cells(of, figures)))
        out.print()
        out.print(table)
    for reason, names in _by_reason(measured, decision).items():
        out.print(Text(f"{reason}: {', '.join(names)}"), soft_wrap=True)
    for sentence in variants_in_words(measured):
        out.print(Text(sentence, style="dim"))


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _label(name: str) -> str:
    return textwrap.fill(name, _NAME_WIDTH)  # at a hyphen, where it does not fit


def variants_in_words(measured: MeasurementsSpec) -> list[str]:
    """What the figures of the table are."""
    best = f", and than the best fp32, {measured.best_fp32}" if measured.best_fp32 else ""
    told = [
        "Second lines: 95 % intervals. x: how many times faster by p50 at batch 1 than "
        f"{measured.reference}{best}."
    ]
    for operation, of in measured.operations.items():
        holds = f": {of.units_per_row:,g} {of.unit} a request" if of.units_per_row != 1 else ""
        told.append(
            f"The first figures are those of {measured.operation}; {operation}{holds}, "
            f"{of.unit}/s at the best batch size."
        )
    mixed, conditions = over_the_mixture(measured), measured.conditions
    if mixed:
        told.append(f"p50 and x are {mixed}; beside them what they are in each state of the cores.")
    if conditions.slices:
        told.append(f"{undisturbed(conditions)} slices were undisturbed; only these are in the figures.")
    return told


def _by_reason(measured: MeasurementsSpec, decision: Decision) -> dict[str, list[str]]:
    """The engines that are out, not verified or not measured, by why."""
    reasons: dict[str, list[str]] = {}
    for name, verdict in decision.verdicts.items():
        if verdict.outcome in ("disqualified", "not built"):
            reasons.setdefault(f"{verdict.outcome}, {verdict.reason}", []).append(name)
        for goal in verdict.unverified:
            reasons.setdefault(f"not verified, {goal}", []).append(name)
    for name, figures in measured.engines.items():
        for figure in ("latency_ms_p50", "latency_ms_p99"):
            why = why_absent(figures, figure)
            if why and why != NOT_MEASURED:
                what = figure.removeprefix("latency_ms_")
                reasons.setdefault(f"{what} {why}", []).append(name)
    return reasons


def variants_markdown(measured: MeasurementsSpec, decision: Decision) -> str:
    """The same table in Markdown, for a README or a lab report."""
    metric = measured.metrics[0]
    head = ("variant", "settings", _heading(metric), *_COLUMNS, "verdict")
    lines = [f"| {' | '.join(head)} |", f"|---|---{'|--:' * (len(head) - 3)}|---|"]
    for name, figures in measured.engines.items():
        cells = [_on_one_line(cell) for cell in _cells(figures, metric)]
        settings = settings_of(figures) or "-"
        lines.append(f"| {' | '.join((name, settings, *cells, decision.verdicts[name].outcome))} |")
    for operation, of in measured.operations.items():
        columns = (operation, *_LATENCY_COLUMNS, f"{of.unit}/s")
        lines += ["", f"| {' | '.join(columns)} |", f"|---{'|--:' * (len(columns) - 1)}|"]
        for name, figures in of.engines.items():
            told = [_on_one_line(cell) for cell in _operation_cells(of, figures)]
            lines.append(f"| {' | '.join((name, *told))} |")
    reasons = [f"{why}: {', '.join(names)}" for why, names in _by_reason(measured, decision).items()]
    for sentence in (*reasons, *variants_in_words(measured)[1:]):
        lines += ["", sentence]
    return "\n".join(lines)


def _on_one_line(cell: str) -> str:
    if cell == _NOT_MEASURED:
        return NOT_MEASURED
    value, *more = cell.split("\n")
    return f"{value} ({'; '.join(more)})" if more else value


def _dim_below(cell: str) -> Text:
    if cell == _NOT_MEASURED:
        return Text(cell)
    value, *more = cell.split("\n")
    return Text("\n").join([Text(value), *(Text(line, style="dim") for line in more)])


def _verdict(decision: Decision, name: str) -> Text:
    styles = {"chosen": "bold green", "tied": "green", "disqualified": "red", "not built": "yellow"}
    outcome = decision.verdicts[name].outcome
    return Text(outcome, style=styles.get(outcome, "dim"))


def _heading(metric: MetricFacts) -> str:
    return metric.heading.replace(",", "")  # as the other columns of a narrow table


def _cells(figures: EngineFigures, metric: MetricFacts) -> list[str]:
    """Of each column the figure, and on the lines below it its interval and what it is in each state."""
    quality, scale = figures.quality.get(metric.name), metric.scale
    shown = quality and Interval(
        value=scale * quality.value, low=scale * quality.low, high=scale * quality.high
    )
    return [
        _interval(shown, decimals=2 if metric.places is None else metric.places) if shown else "-",
        f"{figures.size_bytes / 1e6:.2f}" if figures.size_bytes else "-",
        *(_figure(figures, figure, decimals) for figure, decimals in _FIGURES.items()),
    ]


def _operation_cells(operation: OperationFigures, figures: EngineFigures) -> list[str]:
    """Likewise of a further operation; the last column is the rate, and at which batch size."""
    found = best_rate(operation, figures)
    rate = f"{_interval(found[0], decimals=2)}\nbatch {found[1]}" if found else _NOT_MEASURED
    return [*(_figure(figures, figure, decimals) for figure, decimals in _FIGURES.items()), rate]


def _figure(figures: EngineFigures, figure: str, decimals: int) -> str:
    interval = getattr(figures, figure)
    if interval is None:
        return _NOT_MEASURED if why_absent(figures, figure) else "-"
    is_itself = interval.low == interval.high
    states = [] if is_itself else [f"{state} {value}" for state, value in by_state(figures, figure)]
    return "\n".join([_interval(interval, decimals=decimals), *states])


def _interval(interval: Interval, *, decimals: int) -> str:
    """The value, and below it the interval; at most `decimals`, fewer for large values, so columns fit."""
    if interval.high >= 1:
        decimals = min(decimals, max(0, 2 - int(math.log10(interval.high))))
    value, low, high = (f"{one:.{decimals}f}" for one in (interval.value, interval.low, interval.high))
    return f"{value}\n{low}-{high}"
