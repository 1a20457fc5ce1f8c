"""The page: what was chosen and why, the figures, the pictures, and what they depend on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from xml.etree.ElementTree import Element

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.components.report import charts
from hpml.components.report.content import Content
from hpml.components.report.sections.accuracy import accuracy_detail_section
from hpml.components.report.sections.diagnosis import diagnosis_section
from hpml.components.report.sections.scenarios import scenarios_section
from hpml.core.errors import Terminated
from hpml.measuring.goals import COMPLETION, Goals, Verdict
from hpml.reporting.colours import colour_classes, colour_of_training
from hpml.reporting.costs import condition_facts, costs_section
from hpml.reporting.elements import (
    HALF_PX,
    breakable,
    definitions,
    document,
    drawing,
    interval_cell,
    keyed,
    legend,
    nowrap,
    table,
    value_text,
)
from hpml.reporting.format import ABSENT, TIMES, bounds, duration, megabytes, percent, plain, sentence
from hpml.reporting.markup import Child, node
from hpml.reporting.measurement_tables import (
    engine_cell,
    figure_cell,
    in_each_state,
    incomplete_card,
    over_the_mixture,
    state_facts,
)
from hpml.reporting.over_time import over_time_section
from hpml.reporting.peaks import peaks_section

_PEAKS = "What this machine can do at most"
_OBJECTIVES = {
    "latency_ms_p50": "the least latency p50",
    "latency_ms_p99": "the least latency p99",
    "throughput": "the most images per second",
    "size_bytes": "the least size",
}


def title_of(content: Content) -> str:
    """One line that says what the report found."""
    chosen = content.decision.chosen
    return f"{chosen} was chosen" if chosen else "No engine meets the goals"


def page(content: Content, tell: Callable[[str], None] = lambda _: None) -> str:
    """The whole HTML document. In place of a part that cannot be drawn is a note, which `tell` gets, too."""
    engines, chosen = content.measurements.engines, content.decision.chosen
    classes = colour_classes(engines, reference=content.measurements.reference)
    parts: tuple[tuple[str, Callable[[], Element | None]], ...] = (
        ("The choice", lambda: _headline(content)),
        ("The engines", lambda: _figures_section(content, classes)),
        ("Why it is not faster", lambda: _diagnosis_part(content, classes)),
        ("Accuracy against latency", lambda: _accuracy_section(content, classes)),
        ("Accuracy by class", lambda: accuracy_detail_section(content, classes)),
        ("How the latencies are distributed", lambda: _latency_section(content, classes)),
        (
            "Latency over the time of the run",
            lambda: over_time_section(content.over_time, content.measurements, classes),
        ),
        ("Throughput", lambda: _throughput_section(content, classes)),
        ("Scenarios", lambda: scenarios_section(content, classes)),
        ("Start, memory, energy", lambda: costs_section(engines, classes, chosen)),
        ("Training and fine-tuning", lambda: _training_section(content, classes)),
        ("Where the time went", lambda: _time_section(content)),
        ("What was exported", lambda: _engines_section(content, classes)),
        (_PEAKS, lambda: _peaks_part(content)),
        ("Data and machine", lambda: _environment_section(content)),
        ("How to read this", lambda: _reading_section(content)),
    )
    return document(title_of(content), *(_drawn(title, draw, tell) for title, draw in parts))


def _drawn(title: str, draw: Callable[[], Element | None], tell: Callable[[str], None]) -> Element | None:
    try:
        return draw()
    except Terminated:
        raise
    except Exception as error:  # a figure that nobody foresaw: it is no reason to show none
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        tell(f'"{title}" could not be drawn and is left out of the report: {reason}')
        return _missing(title, f"This part could not be drawn and is left out: {reason}")


def _missing(title: str, why: str) -> Element:
    return node("section", node("h2", title), node("p", why, class_="warning"))


def _diagnosis_part(content: Content, classes: dict[str, str]) -> Element:
    if content.diagnosis is None:
        return _missing("Why it is not faster", _not_here(content, "diagnosis"))
    return diagnosis_section(content.diagnosis, content.peaks, classes, content.decision.chosen)


def _peaks_part(content: Content) -> Element:
    if content.peaks is None:
        return _missing(_PEAKS, _not_here(content, "peaks"))
    return peaks_section(content.peaks)


def _not_here(content: Content, name: str) -> str:
    return f"Not measured: {content.left_out.get(name, 'the run has no such step')}"


# -------------------------------------------------------------------------------------------- the headline


def _headline(content: Content) -> Element:
    decision = content.decision
    if decision.chosen is None:
        nearest = f" The nearest is {decision.nearest}." if decision.nearest else ""
        return node(
            "header",
            node("p", "No engine chosen", class_="eyebrow none"),
            node("h1", title_of(content)),
            node("p", f"{sentence(decision.reason)}{nearest}", class_="lead"),
            node("p", _goals_in_words(content.goals), class_="note"),
            _what_is_missing(content),
        )
    return node(
        "header",
        node("p", "Chosen engine", class_="eyebrow"),
        node("h1", breakable(decision.chosen)),
        node("p", sentence(decision.verdicts[decision.chosen].reason), class_="lead"),
        node("p", _goals_in_words(content.goals), class_="note"),
        [node("p", sentence(f"not verified: {goal}"), class_="warning") for goal in decision.unverified],
        _what_is_missing(content),
        _tiles(content, content.measurements.engines[decision.chosen]),
    )


def _what_is_missing(content: Content) -> Element | None:
    return incomplete_card(
        content.measurements,
        COMPLETION,
        "with the name of this run for RUN goes on where measuring stopped: what was measured counts.",
    )


def _goals_in_words(goals: Goals) -> str:
    allowed = [f"at most {plain(100 * goals.max_accuracy_drop, significant=2)} points of top-1 lost"]
    if goals.max_latency_ms_p99 is not None:
        allowed.append(f"latency p99 at most {plain(goals.max_latency_ms_p99)} ms")
    if goals.max_size_mb is not None:
        allowed.append(f"size at most {plain(goals.max_size_mb)} MB")
    return f"Goals: {', '.join(allowed)}; then {_OBJECTIVES[goals.objective]}."


def _tiles(content: Content, engine: EngineFigures) -> Element:
    reference, best = content.measurements.reference, content.measurements.best_fp32
    beside_best = best and best != content.decision.chosen  # once its own speed says nothing
    states = content.measurements.states
    mixed, settings = over_the_mixture(states), str(engine.settings or "")
    speeds = ["speedup_vs_reference", "speedup_vs_best_fp32"]
    of_reference, of_best = (in_each_state(engine, figure, states).split("; ") for figure in speeds)
    tiles = [
        _tile("latency p50, batch 1", engine.latency_ms_p50, settings, mixed, unit=" ms"),
        _tile(f"the speed of {reference}", engine.speedup_vs_reference, *of_reference, unit=TIMES),
        _tile(f"the speed of {best}", engine.speedup_vs_best_fp32, *of_best, unit=TIMES)
        if beside_best
        else None,
        _tile("top-1 accuracy", engine.accuracy_top1, unit=" %", scale=100, places=1),
        node("div", node("b", megabytes(engine.size_bytes)), node("span", "size on disk"), class_="tile"),
    ]
    return node("div", tiles, class_="tiles")


def _tile(
    caption: str,
    interval: Interval | None,
    *more: str,
    unit: str,
    scale: float = 1.0,
    places: int | None = None,
) -> Element | None:
    if interval is None:
        return None
    return node(
        "div",
        node("b", value_text(interval, scale, places) + unit),
        node("span", caption),
        node("span", bounds(interval, scale=scale, places=places)),
        [node("span", told) for told in more if told],
        class_="tile",
    )


# --------------------------------------------------------------------------------------------- the figures


def _figures_section(content: Content, classes: dict[str, str]) -> Element:
    measurements = content.measurements
    columns = ["engine", "top-1, %", "size", "p50, ms", "p99, ms", f"speed vs {measurements.reference}"]
    if measurements.best_fp32:
        columns.append(f"speed vs {measurements.best_fp32}")
    compared = [f"{measurements.reference}, the reference"]
    if measurements.best_fp32:
        compared.append(
            f"{measurements.best_fp32}, the fastest other engine of the unmodified network in fp32"
        )
    rows = [
        _figures_row(columns, name, engine, content.decision.verdicts[name], classes[name])
        for name, engine in measurements.engines.items()
    ]
    return node(
        "section",
        node("h2", "The engines"),
        table([*columns, "verdict"], rows),
        node(
            "p",
            "Latency is that of one request of one image; under each figure its 95 % interval. "
            f"Speed is the ratio of p50 to that of {' and of '.join(compared)}.{_states_in_words(content)}",
            class_="note",
        ),
    )


def _states_in_words(content: Content) -> str:
    mixed = over_the_mixture(content.measurements.states)
    if not mixed:
        return ""
    return (
        f" Latency p50 and speed are {mixed}; below them what they are in each state of the cores: the host "
        "moves the CPUs of this machine nearer to each other and farther apart."
    )


def _figures_row(
    columns: list[str], name: str, engine: EngineFigures, verdict: Verdict, class_: str
) -> Element:
    cells: list[list[Child]] = [
        engine_cell(name, class_, engine),
        interval_cell(engine.accuracy_top1, scale=100, places=1),
        [nowrap(megabytes(engine.size_bytes) if engine.size_bytes else ABSENT)],
        figure_cell(engine, "latency_ms_p50"),
        figure_cell(engine, "latency_ms_p99"),
        figure_cell(engine, "speedup_vs_reference"),
        figure_cell(engine, "speedup_vs_best_fp32"),
    ]
    shown = [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=False)]
    badge = node("span", verdict.outcome, class_=f"badge {verdict.outcome.replace(' ', '-')}")
    told = node("small", f"{verdict.reason}{'; not verified' if verdict.unverified else ''}")
    shown.append(node("td", badge, told, class_="verdict", data_label="verdict"))
    return node("tr", shown, class_="chosen" if verdict.outcome == "chosen" else None)


# -------------------------------------------------------------------------------------------- the pictures


def _accuracy_section(content: Content, classes: dict[str, str]) -> Element | None:
    caption = (
        "Bars are 95 % intervals. The stepped line is the Pareto front: no engine is both faster and more "
        "accurate than one on it. Dashed: the least accuracy that the goals allow. Ringed: the chosen engine."
    )
    figure = drawing(lambda width: charts.accuracy_against_latency(content, classes, width), caption)
    return node("section", node("h2", "Accuracy against latency"), figure) if figure else None


def _latency_section(content: Content, classes: dict[str, str]) -> Element | None:
    if not content.latency_ms:
        return None
    measurements = content.measurements
    slices = f", each for {measurements.slice_ms:g} ms" if measurements.slice_ms else ""
    caption = (
        f"{measurements.rounds} rounds; in each, all engines in random order{slices}. Each density is scaled "
        "to its own height; the slowest requests, beyond the axis, are in the samples."
    )
    return node(
        "section",
        node("h2", "How the latencies are distributed"),
        drawing(lambda width: charts.latency_distributions(content, classes, width), caption),
    )


def _throughput_section(content: Content, classes: dict[str, str]) -> Element | None:
    figure = drawing(lambda width: charts.throughput_by_batch(content, classes, width))
    if figure is None:
        return None
    measured = {name: e for name, e in content.measurements.engines.items() if e.throughput}
    batches = sorted({item.batch for engine in measured.values() for item in engine.throughput})
    columns = ["engine", *(f"batch {batch}" for batch in batches)]
    rows = []
    for name, engine in measured.items():
        by_batch = {item.batch: item.images_per_s for item in engine.throughput}
        cells: list[list[Child]] = [[keyed(name, classes[name])]]
        cells += [interval_cell(by_batch.get(batch)) for batch in batches]
        chosen = name == content.decision.chosen
        rows.append(
            node(
                "tr",
                [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)],
                class_="chosen" if chosen else None,
            )
        )
    return node(
        "section",
        node("h2", "Throughput, images per second"),
        figure,
        table(columns, rows),
    )


def _training_section(content: Content, classes: dict[str, str]) -> Element | None:
    reference = content.measurements.reference
    colours = [
        colour_of_training(training.names, classes, reference=reference) for training in content.trainings
    ]

    def curves(key: str, title: str, scale: float) -> Element | None:
        return drawing(
            lambda width: charts.training_curves(content.trainings, colours, key, title, width, scale=scale),
            wide_px=HALF_PX,
        )

    pictures = [
        figure
        for figure in (
            curves("loss", "training loss", 1),
            curves("test_accuracy", "top-1 on the test split, %", 100),
        )
        if figure is not None
    ]
    if not pictures:
        return None
    names = [", ".join(training.names) for training in content.trainings]
    return node(
        "section",
        node("h2", "Training and fine-tuning"),
        legend(zip(names, colours, strict=True)),
        node("div", pictures, class_="pair"),
    )


def _time_section(content: Content) -> Element:
    total = sum(step.seconds for step in content.steps)
    caption = (
        f"{duration(total)} in all, some of it side by side. Each step that made an artifact shown here, "
        "with its peak memory; a step found in the cache is shown with what it took when it ran."
    )
    return node(
        "section",
        node("h2", "Where the time went"),
        drawing(lambda width: charts.time_by_step(content.steps, width), caption),
    )


# --------------------------------------------------------------------------------------- what they depend on


def _engines_section(content: Content, classes: dict[str, str]) -> Element:
    exported = [
        node(
            "div",
            node("h3", keyed(name, classes[name])),
            definitions(_engine_facts(engine)),
            node("ul", [node("li", note) for note in engine.notes]) if engine.notes else None,
        )
        for name, engine in content.engines.items()
    ]
    return node("section", node("h2", "What was exported"), node("div", exported, class_="exported"))


def _engine_facts(engine: EngineSpec) -> dict[str, str]:
    facts = {"methods": " → ".join(engine.methods) or "none", "precision": engine.precision}
    if engine.status == "not built":
        return {**facts, "not built": engine.reason}
    return {
        **facts,
        "multiply-accumulates": f"{plain(engine.macs / 1e6)} million an image",
        "parameters": f"{engine.parameters:,}",
        "agreement with torch": f"{percent(engine.top1_agreement)} of the test split have the same class; "
        f"largest error of a logit {plain(engine.max_abs_error, significant=2)}",
        **engine.identity,
    }


def _environment_section(content: Content) -> Element:
    measurements, data = content.measurements, content.data
    splits = ", ".join(f"{split.rows:,} {name}" for name, split in data.splits.items())
    facts = {
        "data": f"{data.source}: {splits}; {len(data.class_names)} classes; {data.licence}",
        "threads of each engine": f"at most {measurements.threads}",
        "cost of timing": f"{plain(measurements.harness_us_per_request, significant=2)} µs a request",
        **_agreement(measurements.engines),
    }
    facts |= condition_facts(measurements.conditions) | state_facts(measurements.states)
    return node(
        "section",
        node("h2", "Data and machine"),
        definitions({**facts, **measurements.environment}),
    )


def _agreement(engines: dict[str, EngineFigures]) -> dict[str, str]:
    spreads = {name: e.round_spread for name, e in engines.items() if e.round_spread is not None}
    if not spreads:
        return {}
    worst = max(spreads, key=lambda name: spreads[name])
    told = f"p50 of the rounds within {percent(spreads[worst])} of each other at worst ({worst})"
    return {"agreement of the rounds": told}


def _reading_section(content: Content) -> Element:
    return node(
        "footer",
        node(
            "p",
            "Intervals of latency, throughput and speed: 95 %, from how the rounds differ; in a ratio the "
            "rounds of the two engines are paired. A percentile is quoted only with the samples that it "
            "needs (662 for p99). Accuracy: of each exported engine, measured on the test split, with "
            "Wilson's interval.",
            class_="note",
        ),
        node("p", "All figures are in figures.json and figures.csv beside this page.", class_="note"),
    )
