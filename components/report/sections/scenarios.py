"""The scenarios of MLPerf Inference, the closed loop, and what more throughput costs in latency."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from hpml.artifacts.measurements import ConcurrencyFigures, ScenarioFigures, ScenarioName
from hpml.components.report import charts
from hpml.components.report.content import Content
from hpml.reporting.elements import HALF_PX, drawing, keyed, legend, nowrap, table, value_text
from hpml.reporting.format import ABSENT, bounds, plain
from hpml.reporting.markup import Child, node

_COLUMNS: dict[ScenarioName, str] = {
    "SingleStream": "SingleStream, p90, ms",
    "MultiStream": "MultiStream, p99, ms",
    "Offline": "Offline, samples/s",
    "Server": "Server, queries/s",
}
_MEANINGS: dict[ScenarioName, str] = {
    "SingleStream": "SingleStream: one sample a query, one query after the other, p90 of the latency.",
    "MultiStream": "MultiStream: eight samples a query, one query after the other, p99 of the query.",
    "Offline": "Offline: all samples at once, in batches of the engine's best size.",
    "Server": "Server: random arrivals (Poisson), the largest rate found with p99 within {bound:g} ms, and "
    "the smallest without.",
}


def scenarios_section(content: Content, classes: dict[str, str]) -> Element | None:
    """What was measured beside single requests; None where nothing was."""
    parts = [
        *_scenarios(content, classes),
        *_closed_loops(content, classes),
        *_pictures(content, classes),
    ]
    return node("section", node("h2", "Scenarios"), parts) if parts else None


# ---------------------------------------------------------------------------------------------- the scenarios


def _scenarios(content: Content, classes: dict[str, str]) -> list[Element]:
    measured = {name: engine for name, engine in content.measurements.engines.items() if engine.scenarios}
    figures = [figure for engine in measured.values() for figure in engine.scenarios]
    if not figures:
        return []
    shown = [name for name in _COLUMNS if any(figure.scenario == name for figure in figures)]
    rows = []
    for name, engine in measured.items():
        of_engine = {figure.scenario: figure for figure in engine.scenarios}
        cells = [_scenario_cell(of_engine.get(scenario)) for scenario in shown]
        rows.append(_row(content, classes, name, [_COLUMNS[scenario] for scenario in shown], cells))
    return [
        table(["engine", *(_COLUMNS[scenario] for scenario in shown)], rows),
        node("p", _meanings(shown, figures), class_="note"),
    ]


def _scenario_cell(figure: ScenarioFigures | None) -> list[Child]:
    if figure is None:
        return [nowrap(ABSENT)]
    if figure.value is None:
        return _absent(figure.reason)
    more = [node("small", bounds(figure.value))]
    if figure.early_stopping_ms is not None:
        more.append(node("small", f"≤ {plain(figure.early_stopping_ms)} at 99 %"))
    if figure.batch is not None:
        more.append(node("small", f"batches of {figure.batch}"))
    return [nowrap(value_text(figure.value)), node("span", more)]


def _meanings(shown: list[ScenarioName], figures: list[ScenarioFigures]) -> str:
    """What the columns are, after what they are not."""
    server = [figure.latency_bound_ms for figure in figures if figure.latency_bound_ms is not None]
    by_loadgen = any(figure.backend == "loadgen" for figure in figures)
    sentences = [
        "Definitions of MLPerf Inference; not an MLPerf result.",
        "The queries were issued by MLPerf's loadgen." if by_loadgen else "",
        *(_MEANINGS[name].format(bound=server[0] if server else 0) for name in shown),
        "At 99 %: what early stopping says that the percentile is below, with 99 % confidence."
        if any(figure.early_stopping_ms is not None for figure in figures)
        else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


# -------------------------------------------------------------------------------------------- the closed loop


def _closed_loops(content: Content, classes: dict[str, str]) -> list[Element]:
    measured = {name: engine for name, engine in content.measurements.engines.items() if engine.concurrency}
    clients = sorted({loop.clients for engine in measured.values() for loop in engine.concurrency})
    if not clients:
        return []
    columns = [f"{count} client{'s' if count > 1 else ''}" for count in clients]
    rows = []
    for name, engine in measured.items():
        of_engine = {loop.clients: loop for loop in engine.concurrency}
        cells = [_loop_cell(of_engine.get(count)) for count in clients]
        rows.append(_row(content, classes, name, columns, cells))
    return [
        node("h3", "Requests per second of clients that each wait for their answer"),
        table(["engine", *columns], rows),
    ]


def _loop_cell(loop: ConcurrencyFigures | None) -> list[Child]:
    if loop is None:
        return [nowrap(ABSENT)]
    if loop.requests_per_s is None or loop.latency_ms_p50 is None:
        return _absent(loop.reason)
    p99 = loop.unquoted if loop.latency_ms_p99 is None else f"{value_text(loop.latency_ms_p99)} ms"
    more = [
        node("small", bounds(loop.requests_per_s)),
        node("small", f"p50 {value_text(loop.latency_ms_p50)} ms"),
        node("small", f"p99 {p99}"),
    ]
    return [nowrap(value_text(loop.requests_per_s)), node("span", more)]


# -------------------------------------------------------------------------------------------- the pictures


def _pictures(content: Content, classes: dict[str, str]) -> list[Element]:
    by_batch = drawing(
        lambda width: charts.throughput_against_latency(content, classes, width, along="batch size"),
        "One request after the other; the numbers are batch sizes.",
        wide_px=HALF_PX,
    )
    by_clients = drawing(
        lambda width: charts.throughput_against_latency(content, classes, width, along="clients"),
        "Requests of one image, p50; the numbers are clients.",
        wide_px=HALF_PX,
    )
    figures = [figure for figure in (by_batch, by_clients) if figure is not None]
    if not figures:
        return []
    names = [name for name, engine in content.measurements.engines.items() if engine.status == "measured"]
    return [
        node("h3", "Throughput against latency"),
        legend((name, classes[name]) for name in names),
        node("div", figures, class_="pair"),
    ]


# ------------------------------------------------------------------------------------------------- all tables


def _row(
    content: Content, classes: dict[str, str], name: str, columns: list[str], cells: list[list[Child]]
) -> Element:
    shown = [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)]
    chosen = name == content.decision.chosen
    return node(
        "tr",
        node("td", keyed(name, classes[name]), data_label="engine"),
        shown,
        class_="chosen" if chosen else None,
    )


def _absent(reason: str) -> list[Child]:
    """A reason may be a sentence, so it may be broken into lines."""
    return [nowrap(ABSENT), node("span", f" {reason}", class_="note")]
