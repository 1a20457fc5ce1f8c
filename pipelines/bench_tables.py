"""The tables of `hpml bench` and `hpml compare`: 80 columns, each figure above its 95 % interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from components.benchmark.record import PAGE, BenchRecord
from components.measurements import EngineFigures, Interval, MeasurementsSpec
from components.page.bench import metric_in_words, output_rows, outputs_in_words
from components.page.format import bounds, percent, plain
from pipelines import console

_PERCENTILES = ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99")
_ABSENT = "-"
_BATCHES_IN_A_TABLE = 4


def show(record: BenchRecord, folder: Path, output: str) -> None:
    """Print what a bench found on stdout, and in a table where the rest is."""
    if output == "json":
        print(record.model_dump_json(indent=2))
        return
    measurements = record.measurements
    if not measurements.invalid:
        _latencies(measurements)
        _throughputs(measurements)
        _scenarios(measurements)
        _costs(measurements)
    _outputs(record)
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
    if interval is None:
        return f"{_ABSENT}\n{absent}" if absent else _ABSENT
    if interval.low == interval.high:  # a ratio to itself
        return plain(interval.value)
    return f"{plain(interval.value)}\n{bounds(interval)}"


def print_figures(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
    """A table on stdout and an empty line; `right` are the columns aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    console.print_table(columns, cells, right=right)
    console.out.print()


def _latencies(measurements: MeasurementsSpec) -> None:
    rows = [
        (
            name,
            *(figure(getattr(engine, one), _missing(engine, one)) for one in _PERCENTILES),
            figure(engine.speedup_vs_reference),
        )
        for name, engine in measurements.engines.items()
    ]
    print_figures(("engine", "p50 ms", "p90 ms", "p99 ms", "x reference"), rows, right=(1, 2, 3, 4))


def _missing(engine: EngineFigures, one: str) -> str:
    """Why a percentile is not quoted: "not enough samples: 350 of 662", on lines that fit."""
    counts = engine.unquoted.get(one, "")
    return f"not enough\nsamples:\n{counts.removesuffix(' samples')}" if counts else ""


def _throughputs(measurements: MeasurementsSpec) -> None:
    batches = sorted({item.batch for engine in measurements.engines.values() for item in engine.throughput})
    for start in range(0, len(batches), _BATCHES_IN_A_TABLE):
        shown = batches[start : start + _BATCHES_IN_A_TABLE]
        rows = []
        for name, engine in measurements.engines.items():
            rates = {item.batch: item.images_per_s for item in engine.throughput}
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
    rows = []
    for name, engine in measurements.engines.items():
        costs = engine.resources
        if costs is None:
            continue
        cells = [
            figure(costs.cold_start_ms),
            figure(costs.load_ms),
            _megabytes(costs.peak_rss_bytes),
            _megabytes(engine.size_bytes),
            figure(costs.energy_mj_per_request),
        ]
        rows.append((name, *cells, *([figure(costs.price_per_million)] if priced else [])))
    columns = ["engine", "cold ms", "load ms", "RSS MB", "size MB", "mJ"] + ["price/1e6"] * priced
    print_figures(columns, rows, right=range(1, len(columns)))


def _megabytes(size_bytes: int | None) -> str:
    return plain(size_bytes / 1e6) if size_bytes else _ABSENT


def _outputs(record: BenchRecord) -> None:
    rows = output_rows(record.outputs, record.measurements.reference)
    if rows:
        print_figures(list(rows[0]), [list(row.values()) for row in rows], right=(2, 3, 4, 5, 6))


def _closing(record: BenchRecord) -> Iterator[str]:
    measurements = record.measurements
    conditions = measurements.conditions
    if not measurements.invalid:
        yield "Second lines: 95 % intervals. - : not measured."
        yield f"x reference: how many times faster by p50 at batch 1 than {measurements.reference}."
    yield from outputs_in_words(record.outputs, measurements.reference)
    if any(engine.scenarios for engine in measurements.engines.values()):
        yield "Scenarios by the definitions of MLPerf Inference; not an MLPerf result."
    energy = {e.resources.energy_source for e in measurements.engines.values() if e.resources} - {""}
    if energy:
        yield f"mJ: energy of a request at batch 1, {'; '.join(sorted(energy))}."
    threads = f"{measurements.threads} thread{'s' if measurements.threads > 1 else ''} each"
    disturbed = f"{conditions.dropped} of {conditions.slices} slices were disturbed"
    causes = f" ({'; '.join(conditions.causes)})" if conditions.causes else ""
    pressure = conditions.cpu_pressure
    waited = f"; CPU pressure {percent(pressure)}" if pressure is not None else ""
    yield f"{measurements.rounds} rounds, {threads}; {disturbed}{causes}{waited}."
