"""The tables of the page, and what is said of their figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    ConcurrencyFigures,
    EngineFigures,
    PairedQuality,
    ScenarioFigures,
    ScenarioName,
)
from hpml.artifacts.metric import MetricFacts
from hpml.components.report.content import Content
from hpml.reporting.cells import Cell, Row, megabytes_cell, named, quality_cell, value_text
from hpml.reporting.costs import condition_facts
from hpml.reporting.format import TIMES, bounds, megabytes, percent, plain
from hpml.reporting.measurement_tables import (
    figure_cell,
    in_each_state,
    over_the_mixture,
    settings_of,
    state_facts,
)
from hpml.tasks import task_of

Classes = Mapping[str, str]  # engine -> CSS class of its colour

SIGNIFICANT = 0.05  # of McNemar's test
_ALL_CLASSES = 12  # so many are shown; of more only the worst
_WORST_CLASSES = 10
_SCENARIOS: dict[ScenarioName, str] = {
    "SingleStream": "SingleStream, p90, ms",
    "MultiStream": "MultiStream, p99, ms",
    "Offline": "Offline, samples/s",
    "Server": "Server, queries/s",
}


def tiles(content: Content) -> list[tuple[str, ...]]:
    """What stands out of the chosen engine: a figure, what it is of, and what is said below."""
    measurements, name = content.measurements, content.decision.chosen or ""
    engine, best, states = measurements.engines[name], measurements.best_fp32, measurements.states
    settings, mixed = settings_of(engine), over_the_mixture(measurements)
    speeds = ("speedup_vs_reference", "speedup_vs_best_fp32")
    of_reference, of_best = (in_each_state(engine, speed, states).split("; ") for speed in speeds)
    shown = [
        ("latency p50, batch 1", engine.latency_ms_p50, " ms", (settings, mixed)),
        (f"the speed of {measurements.reference}", engine.speedup_vs_reference, TIMES, of_reference),
    ]
    if best and best != name:  # once its own speed says nothing
        shown.append((f"the speed of {best}", engine.speedup_vs_best_fp32, TIMES, of_best))
    found = [
        (value_text(interval) + unit, caption, bounds(interval), *more)
        for caption, interval, unit, more in shown
        if interval
    ]
    metric = content.metric
    if figure := engine.quality.get(metric.name):
        value = value_text(figure, metric.scale, metric.places)
        unit = " %" if metric.is_share else f" {metric.unit}".rstrip()
        found.append(
            (f"{value}{unit}", metric.label, bounds(figure, scale=metric.scale, places=metric.places))
        )
    return [*found, (megabytes(engine.size_bytes), "size on disk")]


def engine_rows(content: Content, classes: Classes) -> list[Row]:
    """The figures of each engine, and the verdict."""
    measurements, rows = content.measurements, []
    for name, engine in measurements.engines.items():
        verdict = content.decision.verdicts[name]
        told = f"{verdict.reason}{'; not verified' if verdict.unverified else ''}"
        row = {
            "engine": named(name, classes, settings_of(engine)),
            content.metric.heading: quality_cell(engine.quality, content.metric),
            "size": megabytes_cell(engine.size_bytes),
            "p50, ms": figure_cell(engine, "latency_ms_p50"),
            "p99, ms": figure_cell(engine, "latency_ms_p99"),
            f"speed vs {measurements.reference}": figure_cell(engine, "speedup_vs_reference"),
        }
        if measurements.best_fp32:
            row[f"speed vs {measurements.best_fp32}"] = figure_cell(engine, "speedup_vs_best_fp32")
        style = f"badge {verdict.outcome.replace(' ', '-')}"
        rows.append({**row, "verdict": Cell(verdict.outcome, (told,), style)})
    return rows


# ----------------------------------------------------------------------------------------------- the accuracy


def quality_rows(content: Content, classes: Classes) -> list[Row]:
    """Each engine beside the reference on the same samples; none where no engine was compared."""
    engines = {name: e for name, e in content.measurements.engines.items() if e.quality}
    samples = content.data.split("validation").rows
    rows = [
        {
            "engine": named(name, classes),
            content.metric.heading: quality_cell(engine.quality, content.metric),
            **{
                other.heading: quality_cell(engine.quality, other)
                for other in content.measurements.metrics
                if other.name != content.metric.name
            },
            **_paired_cells(engine.paired, _built(content, name), content.metric, samples),
        }
        for name, engine in engines.items()
    ]
    return rows if any(engine.paired for engine in engines.values()) else []


def _built(content: Content, name: str) -> EngineSpec:
    """An engine as it was measured."""
    return content.engines[name].of_variant(content.measurements.engines[name].variant)


def _paired_cells(paired: PairedQuality | None, engine: EngineSpec, metric: MetricFacts, samples: int) -> Row:
    columns = (f"change, {metric.loss_unit}", "same decisions", "largest error", "verdict")
    if paired is None:
        return {**dict.fromkeys(columns, Cell()), "verdict": Cell("the reference", style="")}
    change = paired.change[metric.name]
    words, counted = _verdict(paired, change, samples)
    agreement, error = paired.agreement, paired.max_abs_error
    if error is None:
        # Outputs too large to be kept were compared at the export, on the same rows with the same network.
        agreement, error = engine.agreement, engine.max_abs_error
    cells = (
        Cell(_signed(change.value), (f"{_signed(change.low)} to {_signed(change.high)}",)),
        Cell() if agreement is None else Cell(percent(agreement)),
        Cell() if error is None else Cell(plain(error, significant=2)),
        Cell(words, (counted,), style=""),
    )
    return dict(zip(columns, cells, strict=True))


def _signed(change: float) -> str:
    """A hundred times a change, with its sign; more is better."""
    text = f"{100 * change:+.2f}".replace("-", "−")  # noqa: RUF001
    return "0.00" if text[1:] == "0.00" else text


def _verdict(paired: PairedQuality, change: Interval, samples: int) -> tuple[str, str]:
    """What the differences show, in words, and what that is based on."""
    p = paired.mcnemar_p
    if p is None:
        if change.low <= 0 <= change.high:
            return f"no difference that {samples:,} rows can show", ""
        return ("better" if change.value > 0 else "worse") + " than the reference", ""
    probability = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    counted = f"{paired.gained:,} gained, {paired.lost:,} lost, {probability}"
    if paired.gained == paired.lost == 0:
        return f"right on the same {samples:,} samples", ""
    if p >= SIGNIFICANT:
        return f"no difference that {samples:,} samples can show", counted
    return ("better" if paired.gained > paired.lost else "worse") + " than the reference", counted


@dataclass(frozen=True)
class ByClass:
    """Top-1 of each engine on the classes that are shown, in the order of `names`.

    which: not all. half_width: of the intervals, as they are in the middle.
    """

    names: list[str]
    top1: dict[str, list[float]]
    which: str
    half_width: float


def by_class(content: Content) -> ByClass | None:
    """All classes, or where they are many those on which some engine is worst; None where there are none."""
    engines = content.measurements.engines
    paired = {name: e.paired.groups for name, e in engines.items() if e.paired and e.paired.groups}
    if not paired:
        return None
    known = [at for at, count in enumerate(content.data.split("validation").class_counts) if count]
    shown = known
    if len(known) > _ALL_CLASSES:
        worst_first = sorted(known, key=lambda at: min(one[at].value for one in paired.values()))
        shown = sorted(worst_first[:_WORST_CLASSES])
    names = content.task.group_names
    return ByClass(
        [names[at] for at in shown],
        {name: [one[at].value for at in shown] for name, one in paired.items()},
        "" if len(shown) == len(known) else f", the {len(shown)} worst of {len(known)}",
        median((one[at].high - one[at].low) / 2 for one in paired.values() for at in shown),
    )


# ---------------------------------------------------------------------------------------------- the scenarios


def scenario_figures(content: Content) -> list[ScenarioFigures]:
    """Of all engines."""
    return [figure for engine in content.measurements.engines.values() for figure in engine.scenarios]


def scenario_rows(content: Content, classes: Classes) -> list[Row]:
    """A column for each scenario of MLPerf Inference that was measured; none where none was."""
    measured = {figure.scenario for figure in scenario_figures(content)}
    rows = []
    for name, engine in content.measurements.engines.items():
        cells = {figure.scenario: _scenario_cell(figure) for figure in engine.scenarios}
        columns = {
            column: cells.get(scenario, Cell())
            for scenario, column in _SCENARIOS.items()
            if scenario in measured
        }
        if cells:
            rows.append({"engine": named(name, classes), **columns})
    return rows


def _scenario_cell(figure: ScenarioFigures) -> Cell:
    if figure.value is None:
        return Cell(small=(figure.reason,))
    early = figure.early_stopping_ms
    return Cell(
        value_text(figure.value),
        (
            bounds(figure.value),
            "" if early is None else f"≤ {plain(early)} at 99 %",
            "" if figure.batch is None else f"batches of {figure.batch}",
        ),
    )


def loop_rows(content: Content, classes: Classes) -> list[Row]:
    """A column for each number of clients that each wait for their answer; none where none was measured."""
    engines = {name: engine for name, engine in content.measurements.engines.items() if engine.concurrency}
    clients = sorted({loop.clients for engine in engines.values() for loop in engine.concurrency})
    rows = []
    for name, engine in engines.items():
        cells = {loop.clients: _loop_cell(loop) for loop in engine.concurrency}
        columns = {f"{count} client{'s' if count > 1 else ''}": cells.get(count, Cell()) for count in clients}
        rows.append({"engine": named(name, classes), **columns})
    return rows


def _loop_cell(loop: ConcurrencyFigures) -> Cell:
    if loop.requests_per_s is None or loop.latency_ms_p50 is None:
        return Cell(small=(loop.reason,))
    p99 = loop.unquoted if loop.latency_ms_p99 is None else f"{value_text(loop.latency_ms_p99)} ms"
    p50 = f"p50 {value_text(loop.latency_ms_p50)} ms"
    return Cell(value_text(loop.requests_per_s), (bounds(loop.requests_per_s), p50, f"p99 {p99}"))


# ---------------------------------------------------------------------------------------- what they depend on


def engine_facts(engine: EngineSpec) -> dict[str, str]:
    """How an engine was made, and what it is."""
    facts = {"methods": " → ".join(engine.methods) or "none", "precision": engine.precision}
    if engine.status == "not built":
        return {**facts, "not built": engine.reason}
    return {
        **facts,
        "multiply-accumulates": f"{plain(engine.macs / 1e6)} million {_a(task_of(engine.task).row)}",
        "parameters": f"{engine.parameters:,}",
        **({"trained from": engine.origin.in_words()} if engine.origin else {}),
        "agreement with torch": _agreement_with_torch(engine),
        **engine.identity,
    }


def _agreement_with_torch(engine: EngineSpec) -> str:
    told = [f"largest error of an output {plain(engine.max_abs_error, significant=2)}"]
    if engine.generation_agreement is not None:
        told.insert(0, f"{percent(engine.generation_agreement)} of what it generates, up to where they part")
    if engine.agreement is not None:
        told.insert(0, f"{percent(engine.agreement)} of what it decides on the validation split")
    return "; ".join(told)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def environment_facts(content: Content) -> dict[str, str]:
    """The data, the machine, and how quiet it was."""
    measurements, data = content.measurements, content.data
    splits = ", ".join(f"{split.rows:,} {name}" for name, split in data.splits.items())
    return {
        "data": f"{data.source}: {splits}; {content.task.data_in_words()}; {data.licence}",
        "threads of each engine": f"at most {measurements.threads}",
        "cost of timing": f"{plain(measurements.harness_us_per_request, significant=2)} µs a request",
        **_agreement(measurements.engines),
        **condition_facts(measurements.conditions),
        **state_facts(measurements.states),
        **measurements.environment,
    }


def _agreement(engines: Mapping[str, EngineFigures]) -> dict[str, str]:
    spreads = {name: e.round_spread for name, e in engines.items() if e.round_spread is not None}
    if not spreads:
        return {}
    worst = max(spreads, key=lambda name: spreads[name])
    told = f"p50 of the rounds within {percent(spreads[worst])} of each other at worst ({worst})"
    return {"agreement of the rounds": told}
