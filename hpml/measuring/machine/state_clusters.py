"""Which distances between the CPUs there were: the clusters of what the probe saw.

No threshold says what is near: other machines, and other Pythons, give other numbers. A state is a peak of
the density of the logarithms that a valley of half its height separates from the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval

_BANDWIDTH = 0.08  # of the logarithm: probes of one state differ by some 10 %, states by 100 %
_VALLEY = 0.5  # of the lower of the two peaks beside it, at most
_LEAST_PROBES = 5
_LEAST_SHARE = 0.03  # of the probes; rarer than that is a disturbance of the probe


@dataclass(frozen=True)
class States:
    """The states, nearest first. edges_ns: between each two of them, ascending."""

    round_trip_ns: NDArray[np.float64]  # of all probes
    edges_ns: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called; "" where there is only one."""
        between = ["middle", *(f"middle {number}" for number in range(2, len(self.edges_ns)))]
        return ("near", *between[: len(self.edges_ns) - 1], "far") if self.edges_ns else ("",)

    def described(self, seconds: Sequence[float]) -> tuple[CoreState, ...]:
        """The states as artifacts carry them: the median of the probes of each, and the middle 95 %.

        seconds: how long each of them was seen.
        """
        index, total = self.of(self.round_trip_ns), sum(seconds)
        described = []
        for state, name in enumerate(self.names):
            low, value, high = np.quantile(self.round_trip_ns[index == state], (0.025, 0.5, 0.975)).tolist()
            described.append(
                CoreState(
                    name=name,
                    round_trip_ns=Interval(value=value, low=low, high=high),
                    share=seconds[state] / total if total else 1 / len(seconds),
                    seconds=seconds[state],
                )
            )
        return tuple(described)

    def of(self, round_trip_ns: NDArray[np.float64]) -> NDArray[np.int64]:
        """The index of the state of each probe."""
        return np.searchsorted(np.asarray(self.edges_ns), round_trip_ns).astype(np.int64)


def find_states(round_trip_ns: NDArray[np.float64]) -> States:
    """The states that probes (at least one) show, in nanoseconds of a round trip."""
    logs = np.log(round_trip_ns)
    grid = np.arange(logs.min() - 3 * _BANDWIDTH, logs.max() + 4 * _BANDWIDTH, _BANDWIDTH / 8)
    density = np.exp(-0.5 * ((grid[:, None] - logs) / _BANDWIDTH) ** 2).sum(axis=1)
    valleys = np.flatnonzero((density[1:-1] <= density[:-2]) & (density[1:-1] < density[2:])) + 1
    edges = [int(valley) for valley in valleys]
    while weak := [edge for edge in edges if not _separates(edge, edges, grid, density, logs)]:
        edges.remove(max(weak, key=lambda edge: density[edge]))
    return States(round_trip_ns, tuple(float(np.exp(grid[edge])) for edge in edges))


def _separates(
    edge: int,
    edges: list[int],
    grid: NDArray[np.float64],
    density: NDArray[np.float64],
    logs: NDArray[np.float64],
) -> bool:
    """Whether there is a state on either side of an edge, as far as the next ones."""
    bounds = [0, *edges, len(grid) - 1]
    at = bounds.index(edge, 1)
    sides = [(bounds[at - 1], edge), (edge, bounds[at + 1])]
    peak = min(density[low : high + 1].max() for low, high in sides)
    probes = min(int(((logs > grid[low]) & (logs <= grid[high])).sum()) for low, high in sides)
    return bool(density[edge] <= _VALLEY * peak and probes >= max(_LEAST_PROBES, _LEAST_SHARE * len(logs)))
