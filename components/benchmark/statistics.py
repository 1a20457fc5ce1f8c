"""Figures with intervals. Requests of a round share its disturbances, so rounds, not requests, are resampled.

Every bootstrap draw is a row of weights: how often each round was drawn. Row 0 has weight 1 everywhere and
gives the point estimate. Figures of two engines taken with the same weights are paired: what slowed a whole
round cancels in their ratio.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from components.measurements import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 2000
CONFIDENCE = 0.95
_CELLS_AT_ONCE = 4_000_000  # of draws x samples held in memory


def samples_needed(level: float, *, confidence: float = 0.99) -> int:
    """How many samples the quantile `level` needs before it may be quoted: 64 for p90, 662 for p99.

    The early-stopping rule of MLPerf's loadgen with one overlatency allowed: the smallest n for which at most
    one of n samples lies beyond the quantile with probability <= 1 - `confidence` (binomial), as described in
    the MLPerf Inference Rules, "Early Stopping".
    """
    n = 2
    while level**n + n * (1 - level) * level ** (n - 1) > 1 - confidence:
        n += 1
    return n


def round_weights(rounds: int, *, seed: int, draws: int = DRAWS) -> NDArray[np.int64]:
    """Weights (1 + draws, rounds): row 0 is all ones, every other row counts `rounds` draws of a round."""
    drawn = np.random.default_rng(seed).multinomial(rounds, np.full(rounds, 1 / rounds), size=draws)
    return np.concatenate([np.ones((1, rounds), np.int64), drawn])


def quantiles(
    samples: NDArray[np.float64], weights: NDArray[np.int64], levels: tuple[float, ...]
) -> NDArray[np.float64]:
    """Nearest-rank quantiles (levels, draws) of `samples` (rounds, requests) pooled under `weights`."""
    rounds, requests = samples.shape
    order = np.argsort(samples, axis=None, kind="stable")
    ordered, round_of = samples.ravel()[order], order // requests
    ranks = np.ceil(np.asarray(levels) * rounds * requests).astype(np.int64)
    found = np.empty((len(levels), len(weights)))
    step = max(1, _CELLS_AT_ONCE // samples.size)
    for start in range(0, len(weights), step):
        cumulative = weights[start : start + step, round_of].cumsum(axis=1)
        for index, rank in enumerate(ranks):
            found[index, start : start + step] = ordered[(cumulative >= rank).argmax(axis=1)]
    return found


def rates(
    amount_per_request: float, seconds: NDArray[np.float64], weights: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Amount per second (draws,) of requests that took `seconds` (rounds, requests), under `weights`."""
    total_s: NDArray[np.float64] = weights @ seconds.sum(axis=1)
    return amount_per_request * seconds.size / total_s


def interval(draws: NDArray[np.float64], *, rounds: int) -> Interval:
    """The point estimate `draws[0]` of a positive figure with its 95 % interval from the other draws.

    The bootstrap's standard error with Student's t over the rounds, on the logarithm: with 5 rounds as with
    50 it holds the truth about 95 times in 100, where percentiles of so few rounds' draws fall to 88 (Davison
    and Hinkley 1997, "Bootstrap Methods and their Application", chapters 2.4 and 5.2). `rounds - 1` corrects
    the bootstrap's variance; on the logarithm the interval of 1 / ratio is that of the ratio turned over.
    """
    error = np.log(draws[1:]).std() * np.sqrt(rounds / (rounds - 1))
    factor = float(np.exp(error * student_t(0.5 + CONFIDENCE / 2, rounds - 1)))
    value = float(draws[0])
    return Interval(value=value, low=value / factor, high=value * factor)


def student_t(level: float, degrees: int) -> float:
    """The quantile `level` of Student's t, by its expansion in 1 / `degrees` (Abramowitz & Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(level)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def wilson(share: float, trials: int) -> Interval:
    """`share` of `trials` with the 95 % score interval of Wilson (1927, JASA 22:209-212)."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return Interval(
        value=share, low=max(0.0, min(centre - half, share)), high=min(1.0, max(centre + half, share))
    )
