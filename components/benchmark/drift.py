"""Whether an engine's level changed while it was measured: slowly, or at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STAGES = 20  # of the run, at most; more rounds are averaged into so many
_NULL_RUNS = 9_999  # made-up runs without drift that a run is compared with; 1 / 10,000 is the least p value


@dataclass(frozen=True)
class Drift:
    """A change of level. change: the level of the end over that of the beginning, less 1.

    p_value: how often a run without any change seems to change as clearly as this one.
    """

    change: float
    p_value: float


def drift(latency_ms: NDArray[np.float64]) -> Drift:
    """Whether the level of `latency_ms` (at least 5 rounds, requests), the median of a round, changed.

    The logarithms of the levels are compared with shapes that a change can have: a straight line over the
    run, and steps that leave at least a quarter of the run on both sides. What counts is the largest absolute
    correlation, and how often rounds that differ by chance have one as large: a Monte Carlo test (Davison and
    Hinkley 1997, "Bootstrap Methods and their Application", chapter 4.2). Rounds are compared, not requests,
    so requests that depend on their neighbours are no drift. Five rounds seldom tell anything. Launches of an
    engine whose levels differ look like steps: who refuses a drift asks for its size, too.
    """
    levels = np.log(np.median(latency_ms, axis=1))
    first = np.linspace(0, len(levels), min(_STAGES, len(levels)), endpoint=False).astype(int)
    stages = np.add.reduceat(levels, first) / np.diff(first, append=len(levels))
    shapes = _shapes(len(stages))
    correlations = shapes @ _standardised(stages)
    best = int(np.abs(correlations).argmax())
    as_clear = int((_null_correlations(len(stages)) >= abs(correlations[best]) - 1e-12).sum())
    size = float(correlations[best]) * float(np.linalg.norm(stages - stages.mean()))
    change = float(np.exp(size * (shapes[best, -1] - shapes[best, 0]))) - 1
    return Drift(change=change, p_value=(1 + as_clear) / (1 + _NULL_RUNS))


def _shapes(stages: int) -> NDArray[np.float64]:
    """The line and the steps, (shapes, stages), each of mean 0 and length 1."""
    least = max(2, -(-stages // 4))
    time = np.arange(stages)
    steps = [time >= first for first in range(least, stages - least + 1)]
    return _standardised(np.array([time, *steps], np.float64))


def _standardised(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The last axis with mean 0 and length 1; zeros where there is no difference but of rounding."""
    centred = levels - levels.mean(axis=-1, keepdims=True)
    length = np.linalg.norm(centred, axis=-1, keepdims=True)
    scaled: NDArray[np.float64] = np.where(length > 1e-12, centred / np.maximum(length, 1e-12), 0.0)
    return scaled


@lru_cache
def _null_correlations(stages: int) -> NDArray[np.float64]:
    """The largest absolute correlation of each of the runs without drift."""
    noise = np.random.default_rng(0).normal(size=(_NULL_RUNS, stages))
    largest: NDArray[np.float64] = np.abs(_standardised(noise) @ _shapes(stages).T).max(axis=1)
    return largest
