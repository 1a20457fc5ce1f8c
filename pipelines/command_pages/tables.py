"""The tables of `hpml bench`, and what is said below them."""

from __future__ import annotations

from collections.abc import Mapping

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    TOLERANCE,
    EngineFigures,
    MeasurementsSpec,
    OutputComparison,
    ScenarioFigures,
    Verdict,
)
from hpml.pipelines.command_pages.pictures import PERCENTILES
from hpml.reporting.cells import Cell, Row, interval_cell, named
from hpml.reporting.costs import condition_facts
from hpml.reporting.format import percent, plain
from hpml.reporting.measurement_tables import figure_cell, in_each_state, settings_of, state_facts


def latency_rows(measurements: MeasurementsSpec, classes: Mapping[str, str]) -> list[Row]:
    """Percentiles at batch 1, and the speed beside the reference."""
    return [
        {
            "engine": named(name, classes, settings_of(engine)),
            **{f"{figure[-3:]}, ms": figure_cell(engine, figure) for figure in PERCENTILES},
            f"speed vs {measurements.reference}": figure_cell(engine, "speedup_vs_reference"),
        }
        for name, engine in measurements.engines.items()
    ]


def speeds(measurements: MeasurementsSpec) -> dict[str, Interval]:
    """How many times faster than the reference each other engine is."""
    return {
        name: engine.speedup_vs_reference
        for name, engine in measurements.engines.items()
        if engine.speedup_vs_reference and name != measurements.reference
    }


def speeds_in_states(measurements: MeasurementsSpec) -> dict[str, str]:
    """The same in each state of the cores, in words."""
    told = {
        name: in_each_state(engine, "speedup_vs_reference", measurements.states)
        for name, engine in measurements.engines.items()
        if name != measurements.reference
    }
    return {name: words for name, words in told.items() if words}


def scenario_rows(engines: Mapping[str, EngineFigures], classes: Mapping[str, str]) -> list[Row]:
    """A row for each scenario of each engine."""
    rows = []
    for name, engine in engines.items():
        for scenario in engine.scenarios:
            figure = interval_cell(scenario.value, scenario.reason)
            row = {
                "engine": named(name, classes),
                "scenario": Cell(scenario.scenario, style=""),
                "figure": Cell(figure.text, (*figure.small, metric_in_words(scenario))),
                "queries": Cell(f"{scenario.queries:,}", style=""),
            }
            rows.append(row)
    return rows


def metric_in_words(scenario: ScenarioFigures) -> str:
    """What the figure of a scenario is."""
    if scenario.metric == "latency_ms_p90":
        return "p90 of a query, ms"
    if scenario.metric == "latency_ms_p99":
        return f"p99 of a query of {scenario.samples_per_query}, ms"
    if scenario.metric == "samples_per_s":
        return "samples per second"
    bound = f" with p99 within {plain(scenario.latency_bound_ms)} ms" if scenario.latency_bound_ms else ""
    return f"queries per second{bound}"


def output_rows(
    outputs: Mapping[str, OutputComparison], reference: str, tolerance: float = TOLERANCE
) -> list[Row]:
    """A row for each output of each engine but the reference, by columns; none where there is no other."""
    return [
        {
            "engine": Cell(name, style=""),
            "output": Cell(
                f"{one.name} ({one.reference_name})" if one.reference_name else one.name, style=""
            ),
            "batch": Cell(str(one.batch)),
            "max diff.": _tiny(one.max_abs_difference),
            "relative": _tiny(one.max_rel_difference),
            "top-1": Cell() if one.top1_agreement is None else Cell(percent(one.top1_agreement)),
            "NaN, inf": Cell(f"{one.nan:,}, {one.infinite:,}" if one.nan or one.infinite else "0"),
            "verdict": _verdict(one.verdict(tolerance)),
        }
        for name, comparison in outputs.items()
        if name != reference
        for one in comparison.outputs
    ]


def _tiny(value: float | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.2g}")


def _verdict(verdict: Verdict) -> Cell:
    return Cell(verdict, style="badge chosen" if verdict == "same" else "badge")


def differing(
    outputs: Mapping[str, OutputComparison], reference: str, tolerance: float
) -> dict[str, list[str]]:
    """The outputs of each engine that are not what the reference answers; without those not compared."""
    found: dict[str, list[str]] = {}
    for name, comparison in outputs.items():
        for one in comparison.outputs if name != reference else ():
            if one.verdict(tolerance) in ("differs", "not finite"):
                found.setdefault(name, []).append(f"{one.name!r} at batch {one.batch}")
    return found


def outputs_in_words(
    outputs: Mapping[str, OutputComparison],
    reference: str,
    tolerance: float = TOLERANCE,
    *,
    are_real: bool = False,
) -> list[str]:
    """The verdict, what the rows of `output_rows` are, and what could not be compared."""
    said = []
    for name, comparison in outputs.items():
        if comparison.reason:
            said.append(f"The outputs of {name} were not compared: {comparison.reason}.")
        said += [
            f"Output {one.name!r} of {name} was not compared at batch {one.batch}: {one.reason}."
            for one in comparison.outputs
            if one.reason
        ]
    others = {name: comparison for name, comparison in outputs.items() if name != reference}
    requests = max((comparison.requests for comparison in others.values()), default=0)
    if not requests:
        return said
    wrong = differing(outputs, reference, tolerance)
    said += [
        f"{name} does not answer as {reference} does, in {', '.join(which)}." for name, which in wrong.items()
    ]
    same = [
        name
        for name, comparison in others.items()
        if name not in wrong and any(one.verdict(tolerance) == "same" for one in comparison.outputs)
    ]
    if same:
        said.append(f"{', '.join(same)}: as {reference} answers, in all outputs that were compared.")
    what = "samples" if are_real else "random samples"
    batched = next((comparison.batched for comparison in others.values() if comparison.batched), {})
    more = "".join(f", and to {count} batches of {batch}" for batch, count in batched.items())
    said.append(
        f"Outputs: the largest difference from what {reference} answers to the same {requests} {what}, one "
        f"at a time{more}; relative: to the largest number of that output, up to "
        f"{100 * tolerance:g} % counts as the same; whole numbers have to be the same. Top-1: of outputs "
        "(batch, classes), the share of samples with the same class. In parentheses: another name there."
        + ("" if are_real else " Inputs are random, so this is no accuracy.")
    )
    return said


def quiet_facts(measurements: MeasurementsSpec) -> dict[str, str]:
    """How quiet the machine was while it measured."""
    timing = f"{plain(measurements.harness_us_per_request, significant=2)} µs a request"
    facts = condition_facts(measurements.conditions) | state_facts(measurements.states)
    return {**facts, "cost of timing": timing}
