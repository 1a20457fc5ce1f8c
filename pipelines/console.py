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

from components.goals import Decision
from components.measurements import EngineFigures, Interval, MeasurementsSpec
from pipelines.run_record import StepRecord

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)

_PLAIN_EVERY_S = 10.0
_NAME_WIDTH = 20  # what the other columns leave of 80
_COLUMNS = ("top-1 %", "MB", "p50 ms", "p99 ms", "x eager", "x fp32")
_MARKS = {
    "done": "[green]done[/]",
    "cached": "[cyan]cached[/]",
    "failed": "[red]failed[/]",
    "blocked": "[yellow]blocked[/]",
    "interrupted": "[yellow]interrupted[/]",
    "running": "running",
    "waiting": "waiting",
}


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
    """A bar for each running step, on a terminal."""

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
            self._progress.console.print(line, soft_wrap=True)

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        """Move the bar."""
        if name in self._tasks:
            self._progress.update(
                self._tasks[name],
                completed=event["done"],
                total=event["total"],
                note=escape(str(event["note"])),
            )

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(escape(text), soft_wrap=True)


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
    mark = _MARKS[record.status]
    name = escape(name)
    if record.status == "done":
        return f"{mark} {name} [dim]{record.seconds:.1f} s[/]"
    if record.status == "failed":
        return f"{mark} {name}: {escape(record.error)}"
    if record.status in ("cached", "blocked", "interrupted"):
        return f"{mark} {name}"
    return ""


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
    """The variants of a run on stdout, each figure above its 95 % interval; fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("variant", overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in measured.engines.items():
        if figures.status == "measured":
            label = textwrap.fill(name, _NAME_WIDTH)  # at a hyphen, where it does not fit
            table.add_row(Text(f"{label}\n") + _verdict(decision, name), *_cells(figures))
    out.print(table)
    for reason, names in _by_reason(decision).items():
        out.print(Text(f"{reason}: {', '.join(names)}"), soft_wrap=True)
    out.print("[dim]Second lines: 95 % intervals. x: how many times faster by p50 at batch 1 than[/]")
    out.print(f"[dim]{escape(measured.reference)}, and than the best fp32, {escape(measured.best_fp32)}.[/]")
    if measured.conditions.warning:
        out.print(Text(measured.conditions.warning, style="yellow"))


def _by_reason(decision: Decision) -> dict[str, list[str]]:
    """The engines that are out, by why."""
    reasons: dict[str, list[str]] = {}
    for name, verdict in decision.verdicts.items():
        if verdict.outcome in ("disqualified", "not built"):
            reasons.setdefault(f"{verdict.outcome}, {verdict.reason}", []).append(name)
    return reasons


def variants_markdown(measured: MeasurementsSpec, decision: Decision) -> str:
    """The same table in Markdown, for a README or a lab report."""
    head = ("variant", *_COLUMNS, "verdict")
    lines = [f"| {' | '.join(head)} |", f"|---{'|--:' * len(_COLUMNS)}|---|"]
    for name, figures in measured.engines.items():
        cells = [_on_one_line(cell.plain) for cell in _cells(figures)]
        lines.append(f"| {' | '.join((name, *cells, decision.verdicts[name].outcome))} |")
    if measured.conditions.warning:
        lines += ["", measured.conditions.warning]
    return "\n".join(lines)


def _on_one_line(cell: str) -> str:
    value, _, bounds = cell.partition("\n")
    return f"{value} ({bounds})" if bounds else value


def _verdict(decision: Decision, name: str) -> Text:
    styles = {"chosen": "bold green", "tied": "green", "disqualified": "red", "not built": "yellow"}
    outcome = decision.verdicts[name].outcome
    return Text(outcome, style=styles.get(outcome, "dim"))


def _cells(figures: EngineFigures) -> list[Text]:
    accuracy = figures.accuracy_top1
    if accuracy:
        accuracy = Interval(value=accuracy.value * 100, low=accuracy.low * 100, high=accuracy.high * 100)
    return [
        _interval(accuracy, decimals=1),
        Text(f"{figures.size_bytes / 1e6:.2f}" if figures.size_bytes else "-"),
        _interval(figures.latency_ms_p50),
        _interval(figures.latency_ms_p99),
        _interval(figures.speedup_vs_reference, decimals=2),
        _interval(figures.speedup_vs_best_fp32, decimals=2),
    ]


def _interval(interval: Interval | None, *, decimals: int = 3) -> Text:
    """The value, and below it the interval; at most `decimals`, fewer for large values, so columns fit."""
    if interval is None:
        return Text("-")
    if interval.high >= 1:
        decimals = min(decimals, max(0, 2 - int(math.log10(interval.high))))
    bounds = f"{interval.low:.{decimals}f}-{interval.high:.{decimals}f}"
    return Text(f"{interval.value:.{decimals}f}\n") + Text(bounds, style="dim")
