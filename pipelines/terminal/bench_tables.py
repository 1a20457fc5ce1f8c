"""The tables of `hpml bench` and `hpml compare`: 80 columns, each figure above its 95 % interval."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.pipelines.bench.record import PAGE, BenchRecord
from hpml.pipelines.command_pages.tables import metric_in_words, output_rows, outputs_in_words
from hpml.pipelines.terminal import console
from hpml.reporting.cells import interval_cell
from hpml.reporting.costs import energy_sources, undisturbed
from hpml.reporting.format import percent, plain
from hpml.reporting.measurement_tables import (
    NOT_MEASURED,
    figure_cell,
    in_each_state,
    over_the_mixture,
    settings_of,
    why_absent,
)

_PERCENTILES = ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99")
_ABSENT = "-"
_BATCHES_IN_A_TABLE = 4


def show(record: BenchRecord, folder: Path, output: str) -> None:
    """Print what a bench found on stdout, and in a table where the rest is."""
    if output == "json":
        print(record.model_dump_json(indent=2))
        return
    measurements = record.measurements
    if measurements.engines:  # a bench that a version before refused has none
        _latencies(measurements)
        _throughputs(measurements)
        _scenarios(measurements)
        _costs(measurements)
    _outputs(record)
    if record.diagnosis:
        _shares(record.diagnosis)
    for sentence in (*_closing(record), *record.notes, f"page: {(folder / PAGE).resolve()}"):
        say(sentence)


def say(sentence: str) -> None:
    """A line on stdout, as it is, but for what could steer the terminal."""
    console.out.print(Text(printable(sentence)), soft_wrap=True)


def printable(text: str) -> str:
    """`text` without what could steer a terminal: names come from files of others."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def figure(interval: Interval | None, absent: str = "") -> str:
    """The cell of a figure: the value above its interval, or why there is none."""
    return interval_cell(interval).lines if interval else f"{_ABSENT}\n{absent}".rstrip()


def print_figures(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
    """A table on stdout and an empty line; `right` are the columns aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    console.print_table(columns, cells, right=right)
    console.out.print()


def _latencies(measurements: MeasurementsSpec) -> None:
    rows = [
        (
            "\n".join(part for part in (name, settings_of(engine)) if part),
            *(_latency(engine, one) for one in (*_PERCENTILES, "speedup_vs_reference")),
        )
        for name, engine in measurements.engines.items()
    ]
    print_figures(("engine", "p50 ms", "p90 ms", "p99 ms", "x reference"), rows, right=(1, 2, 3, 4))


def _latency(engine: EngineFigures, one: str) -> str:
    """The cell of a figure with what it is in each state of the cores, or why there is none."""
    return figure_cell(engine, one).lines if getattr(engine, one) else _missing(engine, one)


def _missing(engine: EngineFigures, one: str) -> str:
    """That it is not measured, on lines that fit; why stands below the tables where it is a sentence."""
    counts = engine.unquoted.get(one, "")
    if counts.endswith(" samples"):
        return f"{_ABSENT}\nnot enough\nsamples:\n{counts.removesuffix(' samples')}"
    return f"{_ABSENT}\nnot\nmeasured" if why_absent(engine, one) else _ABSENT


def _throughputs(measurements: MeasurementsSpec) -> None:
    batches = sorted({item.batch for engine in measurements.engines.values() for item in engine.throughput})
    for start in range(0, len(batches), _BATCHES_IN_A_TABLE):
        shown = batches[start : start + _BATCHES_IN_A_TABLE]
        rows = []
        for name, engine in measurements.engines.items():
            rates = {item.batch: item.rows_per_s for item in engine.throughput}
            rows.append((name, *(figure(rates.get(batch)) for batch in shown)))
        columns = ("samples/s", *(f"batch {batch}" for batch in shown))
        print_figures(columns, rows, right=range(1, len(columns)))


def _scenarios(measurements: MeasurementsSpec) -> None:
    rows = [
        (name, item.scenario, figure(item.value, item.reason), metric_in_words(item))
        for name, engine in measurements.engines.items()
        for item in engine.scenarios
    ]
    if rows:
        print_figures(("engine", "scenario", "figure", "of"), rows, right=(2,))


def _costs(measurements: MeasurementsSpec) -> None:
    priced = any(e.resources and e.resources.price_per_million for e in measurements.engines.values())
    rows = [
        (
            name,
            figure(costs.cold_start_ms),
            figure(costs.load_ms),
            _megabytes(costs.peak_rss_bytes),
            _megabytes(engine.size_bytes),
            figure(costs.energy_mj_per_request),
            *([figure(costs.price_per_million)] * priced),
        )
        for name, engine in measurements.engines.items()
        if (costs := engine.resources)
    ]
    columns = ["engine", "cold ms", "load ms", "RSS MB", "size MB", "mJ"] + ["price/1e6"] * priced
    print_figures(columns, rows, right=range(1, len(columns)))


def _megabytes(size_bytes: int | None) -> str:
    return plain(size_bytes / 1e6) if size_bytes else _ABSENT


def _outputs(record: BenchRecord) -> None:
    """A table for each engine but the reference."""
    rows = output_rows(record.outputs, record.measurements.reference, record.tolerance)
    for engine, of_engine in itertools.groupby(rows, key=lambda row: row["engine"].text):
        cells = [
            {column: cell.lines for column, cell in row.items() if column != "engine"} for row in of_engine
        ]
        say(engine)
        print_figures(list(cells[0]), [list(row.values()) for row in cells], right=(1, 2, 3, 4, 5))


def _shares(diagnosis: DiagnosisSpec) -> None:
    """The share of the machine's peak of each engine."""
    rows = [
        (
            name,
            "-" if one.share_of_roof is None else percent(one.share_of_roof),
            one.bound or "-",
            plain(one.flops / 1e6) if one.flops else "-",
            plain(one.bytes / 1e6) if one.bytes else "-",
        )
        for name, one in diagnosis.engines.items()
    ]
    print_figures(("engine", "of peak", "bound by", "Mflop", "MB moved"), rows, right=(1, 3, 4))


def _closing(record: BenchRecord) -> Iterator[str]:
    measurements = record.measurements
    if measurements.engines:
        yield "Second lines: 95 % intervals. - : not measured."
        yield f"x reference: how many times faster by p50 at batch 1 than {measurements.reference}."
    yield from _states_in_words(measurements)
    for name, engine in measurements.engines.items():
        for one in _PERCENTILES:
            why = why_absent(engine, one)
            if why and why != NOT_MEASURED:
                yield f"{one.removeprefix('latency_ms_')} of {name} is {why}."
    yield from (f"input {told}" for told in record.inputs)
    yield from outputs_in_words(
        record.outputs, measurements.reference, record.tolerance, are_real=bool(record.samples)
    )
    if record.diagnosis:
        yield "of peak: the time that the machine's peaks allow, as a share of that of a request at batch 1."
        for name, found in record.diagnosis.engines.items():
            yield f"{name}: {found.verdict or f'not diagnosed: {found.reason}.'}"
        yield from (f"{note}." for note in record.diagnosis.notes)
    if any(engine.scenarios for engine in measurements.engines.values()):
        yield "Scenarios by the definitions of MLPerf Inference; not an MLPerf result."
    energy = energy_sources(measurements.engines)
    if energy:
        yield f"mJ: energy of a request at batch 1, {energy}."
    yield _conditions(measurements)
    if measurements.incomplete:
        yield f"WARNING: {measurements.incomplete}."


def _states_in_words(measurements: MeasurementsSpec) -> Iterator[str]:
    """What stands for all, and the ratios in each state of the cores."""
    states = measurements.states
    if not over_the_mixture(measurements):
        return
    yield f"p50 and x reference are {over_the_mixture(measurements)}. x reference in each state:"
    for name, engine in measurements.engines.items():
        told = in_each_state(engine, "speedup_vs_reference", states, unit="x")
        if told and name != measurements.reference:
            yield f"  {name}: {told}"


def _conditions(measurements: MeasurementsSpec) -> str:
    """How many rounds and undisturbed slices there were, what disturbed the others, and the pressure."""
    conditions = measurements.conditions
    told = f"{measurements.rounds} rounds"
    if conditions.slices:
        told += f"; {undisturbed(conditions)} slices were undisturbed"
    if conditions.causes:
        told += f" (dropped for: {'; '.join(conditions.causes)})"
    if conditions.unseen:
        told += f"; disturbances could not be seen here: {conditions.unseen}"
    if conditions.cpu_pressure is not None:
        told += f"; CPU pressure {percent(conditions.cpu_pressure)}"
    return f"{told}."
