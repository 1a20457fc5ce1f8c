"""What each engine costs beside the time of a request, and how quiet the machine was: for every page."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from hpml.artifacts.measurements import Conditions, EngineFigures, ResourceFigures
from hpml.reporting.elements import interval_cell, keyed, nowrap, table
from hpml.reporting.format import ABSENT, megabytes, percent
from hpml.reporting.markup import Child, node


def costs_section(
    engines: Mapping[str, EngineFigures], classes: Mapping[str, str], chosen: str | None = None
) -> Element | None:
    """Cold start, load time, memory, size, energy and price of each measured engine."""
    costs = {name: e.resources for name, e in engines.items() if e.resources}
    if not costs:
        return None
    on_gpu = any(one.device_memory_bytes for one in costs.values())
    priced = any(one.price_per_million for one in costs.values())
    columns = ["engine", "cold start, ms", "of that loading, ms", "peak memory", "size", "energy, mJ"]
    columns += ["GPU memory"] * on_gpu + ["price of 1 M"] * priced
    rows = []
    for name, one in costs.items():
        cells: list[list[Child]] = [[keyed(name, classes[name])], *_cells(one, engines[name].size_bytes)]
        cells += [[_bytes(one.device_memory_bytes)]] * on_gpu
        cells += [interval_cell(one.price_per_million)] * priced
        shown = [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)]
        rows.append(node("tr", shown, class_="chosen" if name == chosen else None))
    sources = sorted({one.energy_source for one in costs.values()} - {""})
    return node(
        "section",
        node("h2", "Start, memory, energy"),
        table(columns, rows),
        node(
            "p",
            "Cold start: from the start of a process to its first answer, Python and the runtime's libraries "
            "included; loading is the part that opens the engine. Peak memory: the largest resident set of "
            f"the process. Energy of a request at batch 1: {'; '.join(sources)}."
            + (" Price: of a million samples at the best batch size, at the rate given." if priced else ""),
            class_="note",
        ),
    )


def _cells(costs: ResourceFigures, size_bytes: int) -> list[list[Child]]:
    return [
        interval_cell(costs.cold_start_ms),
        interval_cell(costs.load_ms),
        [_bytes(costs.peak_rss_bytes), None if costs.peak_rss_bytes else node("small", "not measured")],
        [_bytes(size_bytes)],
        interval_cell(costs.energy_mj_per_request, "not measured"),
    ]


def _bytes(count: int | None) -> Element:
    return nowrap(megabytes(count) if count else ABSENT)


def undisturbed(conditions: Conditions) -> str:
    """How many slices there were, and how many of them count: "612 of 645"."""
    return f"{conditions.slices - conditions.dropped:,} of {conditions.slices:,}"


def condition_facts(conditions: Conditions) -> dict[str, str]:
    """How quiet the machine was, as terms with what they are."""
    facts = {}
    if conditions.slices:
        causes = "; ".join(f"{cause} ({count:,})" for cause, count in conditions.causes.items())
        facts["undisturbed slices"] = undisturbed(conditions) + (f"; dropped for: {causes}" if causes else "")
    if conditions.unseen:
        facts["disturbances"] = f"not seen here, so none was dropped: {conditions.unseen}"
    if conditions.cpu_pressure is not None:
        pressure = percent(conditions.cpu_pressure)
        facts["CPU pressure"] = f"{pressure} of the time some task waited for a CPU, ours included"
    return facts | conditions.gpu
