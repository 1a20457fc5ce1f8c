"""Whether a newly registered version replaces the champion. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.core import hardware
from hpml.core.contract import Config, canonical_json
from hpml.measuring.goals import Goals, describe, is_better, objective_interval
from hpml.measuring.state_mixture import latency_in, matched, same_mixture

STANDING_TAG = "hpml.standing"


class Standing(Config):
    """What two versions are compared by; kept as JSON in a tag of each version.

    conditions: what figures depend on beside the engine. Figures taken under other conditions say nothing
    about which engine is better.
    """

    goals: Goals
    conditions: dict[str, str]
    figures: EngineFigures
    states: tuple[CoreState, ...] = ()  # of the cores, that the figures are of
    unit: str = "images"  # what rows are called


def conditions(measurements: MeasurementsSpec, dataset_digest: str) -> dict[str, str]:
    """The conditions of a benchmark: the hardware, the threads of each engine, the data."""
    environment = measurements.environment
    return {
        **{key: environment.get(key, "") for key in hardware.identity()},
        "threads": str(measurements.threads),
        "dataset": dataset_digest,
    }


def judge(
    challenger: Standing, champion_tags: Mapping[str, str] | None, doubts: Sequence[str] = ()
) -> tuple[bool, str]:
    """Whether `challenger` becomes the champion, and why, in words.

    champion_tags: the tags of the present champion's version; None if there is no champion. doubts: what is
    not known of the challenger; with any, it does not become the champion.
    """
    if doubts:
        stays = "it does not become the champion" if champion_tags is None else "the champion stays"
        return False, f"{stays}: {'; '.join(doubts)}"
    if champion_tags is None:
        return True, "there was no champion"
    try:
        champion = Standing.model_validate_json(champion_tags[STANDING_TAG])
    except (KeyError, ValidationError):
        return False, "the champion stays: its version does not say how it was measured"
    if champion.goals != challenger.goals:
        theirs, ours = champion.goals.model_dump(), challenger.goals.model_dump()
        other = canonical_json({name: value for name, value in theirs.items() if value != ours[name]})
        return False, f"the champion stays: it was chosen under other goals, {other}"
    for name, value in challenger.conditions.items():
        there = champion.conditions.get(name, "")
        if there != value:
            return False, f"the champion stays: it was measured with another {name}, {there!r}, not {value!r}"
    return _compare(challenger, champion)


def _compare(challenger: Standing, champion: Standing) -> tuple[bool, str]:
    objective = challenger.goals.objective
    pairs = _like_with_like(challenger, champion)
    if not pairs:
        return False, "the champion stays: the two have no figures of the same state of the cores"
    words = "; ".join(
        f"{describe(objective, ours, challenger.unit)} against {describe(objective, theirs, champion.unit)}"
        for ours, theirs in pairs
    )
    if any(is_better(objective, theirs, ours) for ours, theirs in pairs):
        return False, f"the champion stays, it is better: {words}"
    if any(is_better(objective, ours, theirs) for ours, theirs in pairs):
        return True, f"better than the champion before it: {words}"
    return False, f"the champion stays, the difference is within the noise: {words}"


def _like_with_like(challenger: Standing, champion: Standing) -> list[tuple[Interval, Interval]]:
    """Figures of the objective, the challenger's first: p50 in each state that both saw, else the mixtures'.

    None where one of the two has none, or where the mixtures are not the same.
    """
    objective = challenger.goals.objective
    if objective == "latency_ms_p50":
        in_states = [
            (
                latency_in(challenger.figures, state.after, challenger.states),
                latency_in(champion.figures, state.before, champion.states),
            )
            for state in matched(champion.states, challenger.states)
        ]
        known = [(ours, theirs) for ours, theirs in in_states if ours and theirs]
        if known:
            return known
    ours, theirs = (objective_interval(objective, one.figures) for one in (challenger, champion))
    is_like = objective == "size_bytes" or same_mixture(champion.states, challenger.states)
    return [(ours, theirs)] if is_like and ours and theirs else []
