"""Whether a newly registered version replaces the champion. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from components import hardware
from components.contract import Config, canonical_json
from components.goals import Goals, describe, is_better, objective_interval
from components.measurements import EngineFigures, MeasurementsSpec

STANDING_TAG = "hpml.standing"


class Standing(Config):
    """What two versions are compared by; kept as JSON in a tag of each version.

    conditions: what figures depend on beside the engine. Figures taken under other conditions say nothing
    about which engine is better.
    """

    goals: Goals
    conditions: dict[str, str]
    figures: EngineFigures


def conditions(measurements: MeasurementsSpec, dataset_digest: str) -> dict[str, str]:
    """The conditions of a benchmark: the hardware, the threads of each engine, the data."""
    environment = measurements.environment
    return {
        **{key: environment.get(key, "") for key in hardware.identity()},
        "threads": str(measurements.threads),
        "dataset": dataset_digest,
    }


def judge(challenger: Standing, champion_tags: Mapping[str, str] | None) -> tuple[bool, str]:
    """Whether `challenger` becomes the champion, and why, in words.

    champion_tags: the tags of the present champion's version; None if there is no champion.
    """
    if champion_tags is None:
        return True, "there was no champion"
    try:
        champion = Standing.model_validate_json(champion_tags[STANDING_TAG])
    except (KeyError, ValidationError):
        return False, "the champion stays: its version does not say how it was measured"
    if champion.goals != challenger.goals:
        return (
            False,
            f"the champion stays: it was chosen under other goals, {_difference(champion, challenger)}",
        )
    for name, value in challenger.conditions.items():
        there = champion.conditions.get(name, "")
        if there != value:
            return False, f"the champion stays: it was measured with another {name}, {there!r}, not {value!r}"
    return _compare(challenger, champion)


def _difference(champion: Standing, challenger: Standing) -> str:
    theirs, ours = champion.goals.model_dump(), challenger.goals.model_dump()
    differing = {name: value for name, value in theirs.items() if value != ours[name]}
    return canonical_json(differing)


def _compare(challenger: Standing, champion: Standing) -> tuple[bool, str]:
    objective = challenger.goals.objective
    ours = objective_interval(objective, challenger.figures)
    theirs = objective_interval(objective, champion.figures)
    words = f"{describe(objective, ours)} against {describe(objective, theirs)}"
    if is_better(objective, ours, theirs):
        return True, f"better than the champion before it: {words}"
    if is_better(objective, theirs, ours):
        return False, f"the champion stays, it is better: {words}"
    return False, f"the champion stays, the difference is within the noise: {words}"
