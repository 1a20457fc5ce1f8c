"""The distance between the CPUs of a machine: a matrix, the states that were seen, and what they mean."""

from __future__ import annotations

from itertools import zip_longest

from hpml.artifacts.core_state import CoreDistances
from hpml.reporting.cells import Cell, Row
from hpml.reporting.format import bounds, percent, plain

_ONE_CPU = "There is one CPU to use, so there is no distance between CPUs to measure."


def in_words(cores: CoreDistances) -> str:
    """What was seen, in one or two sentences."""
    if not cores.states:
        return _ONE_CPU
    sample = ""
    if len(cores.cpus) < cores.usable_cpus:
        sample = f" The CPUs are a sample of {len(cores.cpus)} of {cores.usable_cpus}."
    if len(cores.states) == 1:
        return (
            f"One distance in {cores.seconds:.0f} s, so a latency of several threads has one value.{sample}"
        )
    times = "once" if cores.changes == 1 else f"{cores.changes} times"
    return (
        f"The distance changed {times} in {cores.seconds:.0f} s, as the host moved the CPUs: an engine with "
        f"several threads has a latency for each.{sample}"
    )


def state_rows(cores: CoreDistances) -> list[tuple[str, str, str, str]]:
    """Of each state its name, its round trip in ns, the range of that, and its share of the time."""
    return [
        (
            state.name or "all",
            plain(state.round_trip_ns.value),
            bounds(state.round_trip_ns),
            percent(state.share),
        )
        for state in cores.states
    ]


def state_table(cores: CoreDistances) -> list[Row]:
    """The same as a table of a page."""
    columns = ("cores", "round trip, ns", "95 % of the probes", "of the time")
    return [dict(zip(columns, map(Cell, row), strict=True)) for row in state_rows(cores)]


def matrix_rows(cores: CoreDistances) -> list[Row]:
    """Of each CPU its distance from those before it."""
    names = [f"CPU {cpu}" for cpu in cores.cpus]
    rows = []
    for name, row in list(zip(names, cores.round_trips_ns, strict=False))[1:]:
        texts = [f"{round_trip:.0f}" for round_trip in row]
        shown = zip_longest(names[:-1], texts, fillvalue="")
        rows.append({"there and back, ns": Cell(name), **{column: Cell(text) for column, text in shown}})
    return rows
