"""What figures of several states of the cores mean beside each other: their mixture, and which are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures

_ALIKE = 1.5  # round trips of one state differ by less from run to run; those of two states by 2 and more
_SAME_SHARE = 0.1  # mixtures whose shares differ by less are as good as the same


class Matched(NamedTuple):
    """A state that two measurements both saw."""

    before: CoreState
    after: CoreState

    @property
    def name(self) -> str:
        """Of a run that saw one state only, that has no name; the other's may have one."""
        return self.after.name or self.before.name


def mixture(states: Sequence[CoreState]) -> str:
    """The shares of the states: "35 % near, 65 % far"; empty where there is but one."""
    return ", ".join(f"{share(state)} {state.name}" for state in states) if len(states) > 1 else ""


def share(state: CoreState) -> str:
    """Of the time: "35 %"."""
    return f"{100 * state.share:.0f} %"


def matched(before: Sequence[CoreState], after: Sequence[CoreState]) -> list[Matched]:
    """The states that both saw: those whose round trips are alike, whatever they are called."""
    found: list[Matched] = []
    for one in before:
        nearest = min(after, key=lambda other: _apart(one, other), default=None)
        if nearest and _apart(one, nearest) < _ALIKE and nearest not in [match.after for match in found]:
            found.append(Matched(one, nearest))
    return found


def _apart(one: CoreState, other: CoreState) -> float:
    """The larger round trip over the smaller."""
    low, high = sorted((one.round_trip_ns.value, other.round_trip_ns.value))
    return high / low


def same_mixture(before: Sequence[CoreState], after: Sequence[CoreState]) -> bool:
    """Whether figures over the two mixtures are of the same; true where one of them was not looked at."""
    if not before or not after:
        return True
    both = matched(before, after)
    alone = 1 - min(sum(match.before.share for match in both), sum(match.after.share for match in both))
    apart = max((abs(match.before.share - match.after.share) for match in both), default=1.0)
    return max(alone, apart) < _SAME_SHARE


def latency_in(engine: EngineFigures, state: CoreState, states: Sequence[CoreState]) -> Interval | None:
    """p50 in milliseconds of `engine` in one of the `states` of its measurement."""
    if len(states) == 1:
        return engine.latency_ms_p50
    return next((one.latency_ms_p50 for one in engine.states if one.state == state.name), None)
