"""What each engine costs beside the time of a request, and how quiet the machine was: for every page."""

from __future__ import annotations

from collections.abc import Mapping

from hpml.artifacts.measurements import Conditions, EngineFigures
from hpml.reporting.cells import Row, interval_cell, megabytes_cell, named
from hpml.reporting.format import percent


def cost_rows(engines: Mapping[str, EngineFigures], classes: Mapping[str, str]) -> list[Row]:
    """Cold start, load time, memory, size, energy and price of each measured engine."""
    costs = {name: e.resources for name, e in engines.items() if e.resources}
    on_gpu = any(one.device_memory_bytes for one in costs.values())
    priced = any(one.price_per_million for one in costs.values())
    rows = []
    for name, one in costs.items():
        row = {
            "engine": named(name, classes),
            "cold start, ms": interval_cell(one.cold_start_ms),
            "of that loading, ms": interval_cell(one.load_ms),
            "peak memory": megabytes_cell(one.peak_rss_bytes, "not measured"),
            "size": megabytes_cell(engines[name].size_bytes),
            "energy, mJ": interval_cell(one.energy_mj_per_request, "not measured"),
        }
        if on_gpu:
            row["GPU memory"] = megabytes_cell(one.device_memory_bytes)
        if priced:
            row["price of 1 M"] = interval_cell(one.price_per_million)
        rows.append(row)
    return rows


def energy_sources(engines: Mapping[str, EngineFigures]) -> str:
    """Where the figures of energy are from."""
    return "; ".join(sorted({e.resources.energy_source for e in engines.values() if e.resources} - {""}))


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
