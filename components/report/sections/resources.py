"""What each engine costs beside the time of a request: start, memory, size, energy, price."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from components.measurements import EngineFigures, ResourceFigures
from components.page.elements import interval_cell, keyed, nowrap, table
from components.page.format import ABSENT, megabytes
from components.page.markup import Child, node
from components.report.content import Content


def resources_section(content: Content, classes: dict[str, str]) -> Element | None:
    """Cold start, load time, memory, size, energy and price of each measured engine."""
    engines = {name: e for name, e in content.measurements.engines.items() if e.resources}
    if not engines:
        return None
    on_gpu = any(e.resources and e.resources.device_memory_bytes for e in engines.values())
    priced = any(e.resources and e.resources.price_per_million for e in engines.values())
    columns = ["engine", "cold start, ms", "of that loading, ms", "peak memory", "size", "energy, mJ"]
    columns += ["GPU memory"] * on_gpu + ["price of 1 M"] * priced
    rows = [
        node(
            "tr",
            [
                node("td", cell, data_label=column)
                for column, cell in zip(columns, _cells(name, e, classes[name], on_gpu, priced), strict=True)
            ],
            class_="chosen" if name == content.decision.chosen else None,
        )
        for name, e in engines.items()
    ]
    sources = sorted({e.resources.energy_source for e in engines.values() if e.resources})
    return node(
        "section",
        node("h2", "Start, memory, energy"),
        table(columns, rows),
        node(
            "p",
            "Cold start: from the start of a process to its first answer, Python and the runtime's libraries "
            "included; loading is the part that opens the engine. Peak memory: the largest resident set of "
            f"the process. Energy of a request at batch 1: {', '.join(sources)}."
            + (" Price: of a million images at the best batch size, at the rate given." if priced else ""),
            class_="note",
        ),
    )


def _cells(name: str, engine: EngineFigures, class_: str, on_gpu: bool, priced: bool) -> list[list[Child]]:
    resources = engine.resources or ResourceFigures()
    cells: list[list[Child]] = [
        [keyed(name, class_)],
        interval_cell(resources.cold_start_ms, "no quiet start"),
        interval_cell(resources.load_ms),
        [_bytes(resources.peak_rss_bytes)],
        [_bytes(engine.size_bytes)],
        interval_cell(resources.energy_mj_per_request, "not measured"),
    ]
    if on_gpu:
        cells.append([_bytes(resources.device_memory_bytes)])
    if priced:
        cells.append(interval_cell(resources.price_per_million))
    return cells


def _bytes(count: int | None) -> Element:
    return nowrap(megabytes(count) if count else ABSENT)
