"""The rounds: what each engine took, whether it was disturbed, how far the cores were apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpml.measuring.machine.state_clusters import States, find_states

MIXED = -1  # the state of a round in which the cores moved

# engine -> batch size -> milliseconds, float64 (rounds, requests), NaN where a request was disturbed
Latencies = dict[str, dict[int, NDArray[np.float64]]]


@dataclass(frozen=True)
class Round:
    """Every engine once at one batch size.

    launch: of the processes, from 0. at_s: when it began, seconds of the wall clock. round_trip_ns: before
    and after it, NaN where it was not probed. latency_ms, device_ms: engine -> (requests,); the latter
    only of engines on a GPU. Both are empty where something disturbed the round as a whole: it tells no more
    than which state the cores were in.
    """

    batch: int
    launch: int
    at_s: float
    seconds: float
    round_trip_ns: tuple[float, float]
    latency_ms: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    device_ms: dict[str, NDArray[np.float64]] = field(default_factory=dict)


class Rounds:
    """All rounds in the order in which they were timed."""

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self.all = list(rounds)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def launches(self) -> int:
        """How many launches there were."""
        return 1 + max((one.launch for one in self.all), default=-1)

    def at(self, batch: int) -> list[Round]:
        """The rounds at one batch size that count."""
        return [one for one in self.all if one.batch == batch and one.latency_ms]

    def latencies(self, names: Iterable[str], batches: Iterable[int], *, of: str = "latency_ms") -> Latencies:
        """Milliseconds of all requests, or of="device_ms" of those on the GPU, which not every engine has."""
        return {
            name: {batch: _stacked(getattr(one, of)[name] for one in self.at(batch)) for batch in batches}
            for name in names
        }

    def states(self) -> States | None:
        """The distances of the cores in all rounds, also those that do not count; None if none was probed."""
        probes = np.array([one.round_trip_ns for one in self.all]).ravel()
        probes = probes[np.isfinite(probes)]
        return find_states(probes) if probes.size else None


def state_of(rounds: Sequence[Round], states: States | None) -> NDArray[np.int64]:
    """The index of the state of each round, MIXED where the cores moved; 0 where none was probed."""
    if states is None or not rounds:
        return np.zeros(len(rounds), np.int64)
    probes = np.array([one.round_trip_ns for one in rounds])
    before, after = (states.of(probes[:, side]) for side in (0, 1))
    return np.where(before == after, before, MIXED)


def _stacked(slices: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    rows = list(slices)
    return np.stack(rows) if rows else np.empty((0, 0))


def round_orders(names: list[str], *, seed: int) -> Iterator[list[str]]:
    """The order of `names` in each round, without end: random permutations, the same whenever the seed is."""
    rng = np.random.default_rng(seed)
    while True:
        yield [names[index] for index in rng.permutation(len(names))]
