"""Pages of `hpml bench` and `hpml compare`: figures with their intervals, pictures, what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, OutputComparison, ScenarioFigures
from hpml.reporting.colours import colour_classes
from hpml.reporting.costs import condition_facts, costs_section, undisturbed
from hpml.reporting.elements import (
    NARROW_PX,
    breakable,
    definitions,
    document,
    drawing,
    interval_cell,
    keyed,
    table,
)
from hpml.reporting.format import ABSENT, TIMES, bounds, percent, plain, shorten
from hpml.reporting.markup import Child, node
from hpml.reporting.measurement_tables import (
    engine_cell,
    figure_cell,
    in_each_state,
    incomplete_card,
    over_the_mixture,
    state_facts,
)
from hpml.reporting.over_time import LatencyOverTime, over_time_section
from hpml.reporting.svg import Scale, dot, label, line, padded, picture, x_axis

_NAMED = 3  # in a title; more are counted
_PERCENTILES = ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99")
_HOW = (
    "The engines were timed in turns, in random order in each round, each in a process of its own while the "
    "others were stopped. What was disturbed is not in the figures. Intervals are 95 %, from how the rounds "
    "differ; in a ratio the rounds of the two engines are paired. A percentile "
    "is quoted only with the samples that it needs (662 for p99)."
)


# ------------------------------------------------------------------------------------------------- one bench


def bench_page(
    measurements: MeasurementsSpec,
    *,
    facts: Mapping[str, str],
    notes: Sequence[str],
    outputs: Mapping[str, OutputComparison],
    over_time: LatencyOverTime | None = None,
) -> str:
    """The whole HTML document of one bench.

    facts: what figures depend on. notes: what to keep in mind. outputs: what each engine answers. over_time:
    of the rounds; None where the samples do not say when they were.
    """
    classes = colour_classes(measurements.engines, reference=measurements.reference)
    title = _title(measurements)
    return document(
        title,
        node(
            "header",
            node("p", "hpml bench", class_="eyebrow"),
            node("h1", breakable(title)),
            node("p", _lead(measurements), class_="lead"),
            incomplete_card(measurements, facts.get("command", "hpml bench"), "measures again."),
            [node("p", note, class_="warning") for note in notes],
        ),
        *figures_sections(measurements, classes),
        over_time_section(over_time, measurements, classes),
        _outputs_section(outputs, measurements.reference),
        conditions_section(measurements),
        node("section", node("h2", "Machine and versions"), definitions(facts)),
        node("footer", node("p", _HOW, class_="note")),
    )


def _title(measurements: MeasurementsSpec) -> str:
    names = list(measurements.engines)
    if not names:  # a bench that a version before refused
        return "There are no figures"
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} engines"


def _lead(measurements: MeasurementsSpec) -> str:
    conditions = measurements.conditions
    slices = f"; {undisturbed(conditions)} slices were undisturbed" if conditions.slices else ""
    return f"{measurements.rounds} rounds{slices}. Ratios are to {measurements.reference}."


def figures_sections(measurements: MeasurementsSpec, classes: Mapping[str, str]) -> list[Element | None]:
    """Latency, throughput, scenarios and costs. classes: the colour of each engine."""
    engines = measurements.engines
    if not engines:
        return []
    return [
        _latency_section(measurements, classes),
        _throughput_section(engines, classes),
        _scenario_section(engines, classes),
        costs_section(engines, classes),
    ]


def _latency_section(measurements: MeasurementsSpec, classes: Mapping[str, str]) -> Element:
    engines = measurements.engines
    columns = ["engine", "p50, ms", "p90, ms", "p99, ms", f"speed vs {measurements.reference}"]
    rows = [
        _row(
            columns,
            engine_cell(name, classes[name], engine),
            *(figure_cell(engine, figure) for figure in _PERCENTILES),
            figure_cell(engine, "speedup_vs_reference"),
        )
        for name, engine in engines.items()
    ]
    ratios = {
        name: engine.speedup_vs_reference
        for name, engine in engines.items()
        if engine.speedup_vs_reference and name != measurements.reference
    }
    return node(
        "section",
        node("h2", "Latency of one request at batch 1"),
        table(columns, rows),
        _states_note(measurements),
        drawing(lambda width: _latency_picture(engines, classes, width), "Dots: p50, p90 and p99."),
        drawing(
            lambda width: ratio_picture(ratios, classes, f"times as fast as {measurements.reference}", width),
            "Dots are ratios of p50 with their 95 % intervals; right of the dashed line is faster.",
        ),
    )


def _states_note(measurements: MeasurementsSpec) -> Element | None:
    """What stands for all, and the ratios in each state of the cores."""
    states = measurements.states
    if not over_the_mixture(states):
        return None
    ratios = [
        node("li", f"{name}: {told}")
        for name, engine in measurements.engines.items()
        if name != measurements.reference and (told := in_each_state(engine, "speedup_vs_reference", states))
    ]
    return node(
        "div",
        node("p", f"p50 and speed are {over_the_mixture(states)}. Speed in each state:", class_="note"),
        node("ul", ratios, class_="note"),
    )


def _throughput_section(engines: Mapping[str, EngineFigures], classes: Mapping[str, str]) -> Element | None:
    batches = sorted({item.batch for engine in engines.values() for item in engine.throughput})
    if not batches:
        return None
    columns = ["engine", *(f"batch {batch}" for batch in batches)]
    rows = []
    for name, engine in engines.items():
        rates = {item.batch: item.images_per_s for item in engine.throughput}
        rows.append(
            _row(columns, keyed(name, classes[name]), *(interval_cell(rates.get(batch)) for batch in batches))
        )
    return node("section", node("h2", "Throughput, samples per second"), table(columns, rows))


def _scenario_section(engines: Mapping[str, EngineFigures], classes: Mapping[str, str]) -> Element | None:
    columns = ["engine", "scenario", "figure", "queries"]
    rows = [
        _row(
            columns,
            keyed(name, classes[name]),
            scenario.scenario,
            [*interval_cell(scenario.value, scenario.reason), node("small", metric_in_words(scenario))],
            f"{scenario.queries:,}",
        )
        for name, engine in engines.items()
        for scenario in engine.scenarios
    ]
    if not rows:
        return None
    return node(
        "section",
        node("h2", "Scenarios"),
        table(columns, rows),
        node("p", "By the definitions of MLPerf Inference; not an MLPerf result.", class_="note"),
    )


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


def _outputs_section(outputs: Mapping[str, OutputComparison], reference: str) -> Element | None:
    rows = [
        node("tr", [node("td", breakable(cell), data_label=name) for name, cell in row.items()])
        for row in output_rows(outputs, reference)
    ]
    if not rows:
        return None
    return node(
        "section",
        node("h2", "Outputs"),
        table(next(iter(output_rows(outputs, reference))), rows),
        [node("p", sentence, class_="note") for sentence in outputs_in_words(outputs, reference)],
    )


def output_rows(outputs: Mapping[str, OutputComparison], reference: str) -> list[dict[str, str]]:
    """A row for each output of each engine but the reference, by columns; none where there is no other."""
    return [
        {
            "engine": name,
            "output": f"{one.name} ({one.reference_name})" if one.reference_name else one.name,
            "max difference": _tiny(one.max_abs_difference),
            "relative": _tiny(one.max_rel_difference),
            "same top-1": ABSENT if one.top1_agreement is None else percent(one.top1_agreement),
            "NaN": f"{one.nan:,}",
            "inf": f"{one.infinite:,}",
        }
        for name, comparison in outputs.items()
        if name != reference
        for one in comparison.outputs
    ]


def _tiny(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2g}"


def outputs_in_words(outputs: Mapping[str, OutputComparison], reference: str) -> list[str]:
    """What the rows of `output_rows` are, and what could not be compared."""
    said = []
    for name, comparison in outputs.items():
        if comparison.reason:
            said.append(f"The outputs of {name} were not compared: {comparison.reason}.")
        said += [
            f"Output {one.name!r} of {name} was not compared: {one.reason}."
            for one in comparison.outputs
            if one.reason
        ]
    requests = max((comparison.requests for comparison in outputs.values()), default=0)
    if requests:
        said.append(
            f"Outputs: the largest difference from what {reference} answers to the same {requests} random "
            "requests; relative: to the largest number of that output. Same top-1: of outputs (1, classes), "
            "the share of requests with the same class. Inputs are random, so this is no accuracy. In "
            "parentheses: another name there."
        )
    return said


def conditions_section(measurements: MeasurementsSpec) -> Element:
    """How quiet the machine was while it measured."""
    told = {
        **condition_facts(measurements.conditions),
        **state_facts(measurements.states),
        "cost of timing": f"{plain(measurements.harness_us_per_request, significant=2)} µs a request",
    }
    return node("section", node("h2", "How quiet the machine was"), definitions(told))


# ----------------------------------------------------------------------------------------------- a comparison


@dataclass(frozen=True)
class Row:
    """One figure of an engine in two measurements. ratio: above 1 the second is better.

    is_like: whether both are of the same state of the cores, or of the same mixture.
    """

    engine: str
    figure: str
    before: Interval
    after: Interval
    ratio: Interval
    verdict: str  # "faster", "slower", "tied", "undecided"; "not alike"
    is_like: bool = True


def compare_page(
    title: str, rows: Sequence[Row], *, names: tuple[str, str], warnings: Sequence[str], notes: Sequence[str]
) -> str:
    """The whole HTML document of a comparison. names: of the two measurements."""
    classes = colour_classes(dict.fromkeys(row.engine for row in rows), reference="")
    columns = ["engine", "figure", "before", "after", "ratio", "verdict"]
    shown = []
    for row in rows:
        badge = node("span", row.verdict, class_="badge" + (" chosen" if row.verdict == "faster" else ""))
        cells = _row(
            columns[:-1],
            keyed(row.engine, classes[row.engine]),
            row.figure,
            *(interval_cell(one) for one in (row.before, row.after, row.ratio)),
        )
        cells.append(node("td", badge, class_="verdict", data_label="verdict"))
        shown.append(cells)
    ratios = {f"{row.engine}, {row.figure}": row.ratio for row in rows}
    of_rows = {f"{row.engine}, {row.figure}": classes[row.engine] for row in rows}
    return document(
        title,
        node(
            "header",
            node("p", "hpml compare", class_="eyebrow"),
            node("h1", breakable(title)),
            [node("p", warning, class_="warning") for warning in warnings],
        ),
        node(
            "section",
            node("h2", "Before and after"),
            node("p", f"Before: {names[0]}. After: {names[1]}.", class_="note"),
            table(columns, shown),
            drawing(
                lambda width: ratio_picture(ratios, of_rows, "after, times as fast as before", width),
                "Dots are ratios with their 95 % intervals; right of the dashed line the second is faster.",
            ),
        ),
        node("footer", [node("p", note, class_="note") for note in notes]),
    )


# ----------------------------------------------------------------------------------------------- the pictures


class _Rows:
    """Rows with a name each: left of the picture, or above the row where it is narrow."""

    def __init__(self, count: int, width: float) -> None:
        self.narrow = width <= NARROW_PX
        self.pitch = 46.0 if self.narrow else 30.0
        self.left, self.right = (20.0 if self.narrow else 230.0), width - 16
        self.bottom = 6 + self.pitch * count
        self.height = self.bottom + 44

    def at(self, index: int) -> float:
        """The height of the middle of a row."""
        return 6 + self.pitch * (index + 1) - (14 if self.narrow else self.pitch / 2)

    def name(self, index: int, text: str) -> Element:
        if self.narrow:
            return label(shorten(text, 46), self.left, self.at(index) - 14, "name")
        return label(shorten(text, 32), self.left - 14, self.at(index) + 4, "name", anchor="end")


def _latency_picture(
    engines: Mapping[str, EngineFigures], classes: Mapping[str, str], width: float
) -> Element | None:
    quoted = {
        name: [interval for figure in _PERCENTILES if (interval := getattr(engine, figure)) is not None]
        for name, engine in engines.items()
    }
    quoted = {name: intervals for name, intervals in quoted.items() if intervals}
    if not quoted:
        return None
    rows = _Rows(len(quoted), width)
    ends = [end for intervals in quoted.values() for one in intervals for end in (one.low, one.high)]
    x = padded(ends, rows.left, rows.right, log=True)
    drawn = x_axis(x, 4, rows.bottom, "latency at batch 1, ms (log scale)")
    for index, (name, intervals) in enumerate(quoted.items()):
        y, class_ = rows.at(index), classes[name]
        drawn.append(rows.name(index, name))
        drawn.append(line(x(intervals[0].value), y, x(intervals[-1].value), y, f"whisker {class_}"))
        for radius, interval in zip((5.0, 4.0, 3.0), intervals, strict=False):
            drawn += _whisker(x, interval, y, class_, radius)
    return picture(width, rows.height, "p50, p90 and p99 of each engine", drawn)


def ratio_picture(
    ratios: Mapping[str, Interval], classes: Mapping[str, str], axis: str, width: float
) -> Element | None:
    """Ratios with their intervals around 1."""
    if not ratios:
        return None
    rows = _Rows(len(ratios), width)
    ends = [1.0, *(end for ratio in ratios.values() for end in (ratio.low, ratio.high))]
    x = padded(ends, rows.left, rows.right, log=True)
    drawn = x_axis(x, 4, rows.bottom, shorten(f"{axis} (log scale)", int((rows.right - rows.left) / 7)))
    drawn.append(line(x(1.0), 4, x(1.0), rows.bottom, "floor"))
    for index, (name, ratio) in enumerate(ratios.items()):
        drawn.append(rows.name(index, name))
        drawn += _whisker(x, ratio, rows.at(index), classes[name], 4.5)
    return picture(width, rows.height, f"{axis}, with intervals", drawn)


def _whisker(x: Scale, interval: Interval, y: float, class_: str, radius: float) -> list[Element]:
    low, high = x(interval.low), x(interval.high)
    strokes = [line(low, y, high, y, f"mark {class_}")]
    strokes += [line(end, y - 5, end, y + 5, f"mark {class_}") for end in (low, high)]
    return [*strokes, dot(x(interval.value), y, radius, f"point {class_}")]


def _row(columns: Sequence[str], *cells: Child | list[Child]) -> Element:
    return node(
        "tr", [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)]
    )


def ratio_in_words(ratio: Interval) -> str:
    """A ratio and its interval on one line."""
    return f"{plain(ratio.value)}{TIMES} ({bounds(ratio)})"
