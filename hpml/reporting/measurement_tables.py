"""How the figures of an engine are told: over the mixture of states and in each, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    EngineFigures,
    MeasurementsSpec,
    OperationFigures,
    StateFigures,
    Throughput,
)
from hpml.measuring.state_mixture import mixture, share
from hpml.reporting.cells import Cell, Row, interval_cell, named, value_text
from hpml.reporting.format import ABSENT, TIMES, bounds, plain

NOT_MEASURED = "not measured"


def why_absent(engine: EngineFigures, figure: str) -> str:
    """Why there is no `figure`: "not measured: 350 of 662 samples"; empty where nothing is missing.

    Why an engine was not timed at all stands at its p50 and is not said again at every figure.
    """
    if getattr(engine, figure) is not None or engine.status == "not built":
        return ""
    if engine.status == "measured" and figure not in ("latency_ms_p50", *engine.unquoted):
        return ""  # such as the speed beside an fp32 engine that there is not
    why = engine.unquoted.get(figure, "") or (engine.reason if figure == "latency_ms_p50" else "")
    return f"{NOT_MEASURED}: {why}" if why else NOT_MEASURED


def figure_cell(engine: EngineFigures, figure: str) -> Cell:
    """The figure, its interval and what it is in each state of the cores, or why there is none."""
    interval: Interval | None = getattr(engine, figure)
    if interval is None:
        return Cell(small=(why_absent(engine, figure),))
    if interval.low == interval.high:  # a ratio to itself has no states
        return Cell(value_text(interval))
    in_states = (f"{state} {value}" for state, value in by_state(engine, figure))
    return Cell(value_text(interval), (bounds(interval), *in_states))


def by_state(engine: EngineFigures, figure: str) -> list[tuple[str, str]]:
    """What `figure` is in each state, where there are several and it has such figures: ("near", "0.199")."""
    if len(engine.states) < 2 or figure not in StateFigures.model_fields:
        return []
    return [(one.state, _value(getattr(one, figure))) for one in engine.states]


def _value(interval: Interval | None) -> str:
    return plain(interval.value) if interval else NOT_MEASURED


def in_each_state(engine: EngineFigures, figure: str, states: Sequence[CoreState], unit: str = TIMES) -> str:
    """What `figure` is in each state, in words: "cores near, 35 %: 5.9x; cores far, 65 %: 7.2x"."""
    shares = {state.name: share(state) for state in states}
    return "; ".join(
        f"cores {state}, {shares.get(state, ABSENT)}: {value}{'' if value == NOT_MEASURED else unit}"
        for state, value in by_state(engine, figure)
    )


def over_the_mixture(measured: MeasurementsSpec) -> str:
    """What the figures that stand for all are of; empty without any, or with the cores at one distance."""
    quoted = any(engine.latency_ms_p50 for engine in measured.engines.values())
    told = mixture(measured.states) if quoted else ""
    return f"over the mixture seen: {told}" if told else ""


def state_facts(states: Sequence[CoreState]) -> dict[str, str]:
    """The distances between the cores, as terms with what they are."""
    facts = {}
    for state in states:
        trip = state.round_trip_ns
        facts[f"cores {state.name}".strip()] = (
            f"{share(state)} of the time; a cache line's round trip takes {trip.value:,.0f} ns "
            f"({trip.low:,.0f} to {trip.high:,.0f})"
        )
    return facts


def settings_of(engine: EngineFigures) -> str:
    """What the figures hold for: "2 threads, spinning"; empty where it was not noted."""
    return str(engine.settings or "")


def throughput_rows(engines: Mapping[str, EngineFigures], classes: Mapping[str, str]) -> list[Row]:
    """Rows per second at each batch size that some engine was measured at; none where none was."""
    batches = sorted({item.batch for engine in engines.values() for item in engine.throughput})
    rows = []
    for name, engine in engines.items():
        rates = {item.batch: item.rows_per_s for item in engine.throughput}
        of_batches = {f"batch {batch}": interval_cell(rates.get(batch)) for batch in batches}
        rows.append({"engine": named(name, classes), **of_batches})
    return rows if batches else []


def operation_rows(operation: str, measured: MeasurementsSpec, classes: Mapping[str, str]) -> list[Row]:
    """The figures of each engine in a further operation: latency, speed, and rates by batch size."""
    figures, rows = measured.operations[operation], []
    batches = sorted({item.batch for engine in figures.engines.values() for item in engine.throughput})
    for name, engine in figures.engines.items():
        row = {
            "engine": named(name, classes, settings_of(engine)),
            "p50, ms": figure_cell(engine, "latency_ms_p50"),
            "p99, ms": figure_cell(engine, "latency_ms_p99"),
            f"speed vs {measured.reference}": figure_cell(engine, "speedup_vs_reference"),
        }
        if measured.best_fp32:
            row[f"speed vs {measured.best_fp32}"] = figure_cell(engine, "speedup_vs_best_fp32")
        rates = {item.batch: rate(figures, item) for item in engine.throughput}
        for batch in batches:
            row[f"{figures.unit}/s, batch {batch}"] = interval_cell(rates.get(batch), NOT_MEASURED)
        rows.append(row)
    return rows


def rate(operation: OperationFigures, throughput: Throughput) -> Interval:
    """What an engine does in a second, in the operation's unit."""
    return throughput.rows_per_s.scaled(operation.units_per_row)


def best_rate(operation: OperationFigures, engine: EngineFigures) -> tuple[Interval, int] | None:
    """The largest rate of an engine, and its batch size; None where none is known."""
    rates = [(rate(operation, item), item.batch) for item in engine.throughput]
    return max(rates, key=lambda found: found[0].value, default=None)
