"""How the figures of an engine are told: over the mixture of states and in each, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, StateFigures
from hpml.measuring.state_mixture import mixture, share
from hpml.reporting.elements import breakable, nowrap, value_text
from hpml.reporting.format import ABSENT, TIMES, bounds, plain, sentence
from hpml.reporting.markup import Child, node

NOT_MEASURED = "not measured"


def why_absent(engine: EngineFigures, figure: str) -> str:
    """Why there is no `figure`: "not measured: 350 of 662 samples"; empty where nothing is missing.

    Why an engine was not timed at all stands at its p50 and is not said again at every figure.
    """
    if getattr(engine, figure) is not None or engine.status == "not built":
        return ""
    if engine.status == "measured" and figure not in ("latency_ms_p50", *engine.unquoted):
        return ""  # such as the speed beside an fp32 engine that there is not
    why = engine.unquoted.get(figure, "") or (engine.reason if figure == "latency_ms_p50" else "")
    return f"{NOT_MEASURED}: {why}" if why else NOT_MEASURED


def figure_cell(engine: EngineFigures, figure: str, unit: str = "") -> list[Child]:
    """The inside of a table's cell: the figure, its interval, and what it is in each state of the cores."""
    interval: Interval | None = getattr(engine, figure)
    small: list[Child] = []
    if interval is None:
        why = why_absent(engine, figure)
        small = [node("small", why, class_="why")] if why else []
    elif interval.low != interval.high:  # a ratio to itself has no states
        small = [node("small", bounds(interval))]
        small += [node("small", f"{state} {value}{unit}") for state, value in by_state(engine, figure)]
    value = ABSENT if interval is None else value_text(interval) + unit
    return [nowrap(value), node("span", small) if small else None]


def by_state(engine: EngineFigures, figure: str) -> list[tuple[str, str]]:
    """What `figure` is in each state, where there are several and it has such figures: ("near", "0.199")."""
    if len(engine.states) < 2 or figure not in StateFigures.model_fields:
        return []
    return [(one.state, _value(getattr(one, figure))) for one in engine.states]


def _value(interval: Interval | None) -> str:
    return plain(interval.value) if interval else NOT_MEASURED


def in_each_state(engine: EngineFigures, figure: str, states: Sequence[CoreState], unit: str = TIMES) -> str:
    """What `figure` is in each state, in words: "cores near, 35 %: 5.9x; cores far, 65 %: 7.2x"."""
    shares = {state.name: share(state) for state in states}
    return "; ".join(
        f"cores {state}, {shares.get(state, ABSENT)}: {value}{'' if value == NOT_MEASURED else unit}"
        for state, value in by_state(engine, figure)
    )


def over_the_mixture(states: Sequence[CoreState]) -> str:
    """What the figures that stand for all are of; empty where the cores were at one distance."""
    told = mixture(states)
    return f"over the mixture seen: {told}" if told else ""


def state_facts(states: Sequence[CoreState]) -> dict[str, str]:
    """The distances between the cores, as terms with what they are."""
    facts = {}
    for state in states:
        trip = state.round_trip_ns
        facts[f"cores {state.name}".strip()] = (
            f"{share(state)} of the time; a cache line's round trip takes {trip.value:,.0f} ns "
            f"({trip.low:,.0f} to {trip.high:,.0f})"
        )
    return facts


def settings_of(engine: EngineFigures) -> str:
    """What the figures hold for: "2 threads, spinning"; empty where it was not noted."""
    return str(engine.settings) if engine.settings else ""


def engine_cell(name: str, class_: str, engine: EngineFigures) -> list[Child]:
    """The name of an engine behind the dot of its colour, and below it its settings."""
    settings = settings_of(engine)
    return [
        node(
            "span",
            node("span", "", class_=f"key {class_}"),
            node("span", breakable(name), node("small", settings, class_="why") if settings else None),
            class_="keyed",
        )
    ]


def incomplete_card(measurements: MeasurementsSpec, command: str, effect: str) -> Element | None:
    """What is not measured, why, and the `command` that completes it; None where nothing is missing."""
    if not measurements.incomplete:
        return None
    return node(
        "section",
        node("p", node("b", "Not all is measured. "), sentence(measurements.incomplete)),
        node("p", node("code", command), f" {effect}"),
        class_="card",
    )
