"""The distance between the CPUs of a machine: a matrix, the states that were seen, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from hpml.artifacts.core_state import CoreDistances
from hpml.reporting.elements import table
from hpml.reporting.format import bounds, percent, plain
from hpml.reporting.markup import node

_ONE_CPU = "There is one CPU to use, so there is no distance between CPUs to measure."
_HOW = (
    "Two processes, pinned to a CPU each, take turns at changing one byte; some 100 ns of a round trip are "
    "Python's. Each pair is the median of 100 chunks of 50 turns."
)


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


def cores_section(cores: CoreDistances) -> Element:
    """The matrix and the states as tables."""
    return node(
        "section",
        node("h2", "How far the CPUs are from each other"),
        node("p", in_words(cores)),
        _matrix(cores) if cores.round_trips_ns else None,
        _states(cores) if cores.states else None,
        node("p", _HOW, class_="note") if cores.states else None,
    )


def _matrix(cores: CoreDistances) -> Element:
    names = [f"CPU {cpu}" for cpu in cores.cpus]
    columns = ["there and back, ns", *names[:-1]]
    rows = []
    for at, row in list(enumerate(cores.round_trips_ns))[1:]:
        empty = [""] * (len(names) - 1 - at)
        rows.append(_row(columns, [names[at], *(f"{round_trip:.0f}" for round_trip in row), *empty]))
    return table(columns, rows)


def _states(cores: CoreDistances) -> Element:
    columns = ["cores", "round trip, ns", "95 % of the probes", "of the time"]
    return table(columns, [_row(columns, row) for row in state_rows(cores)])


def _row(columns: Sequence[str], cells: Sequence[str]) -> Element:
    return node(
        "tr", [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)]
    )
