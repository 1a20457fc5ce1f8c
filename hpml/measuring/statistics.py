"""Figures with 95 % intervals, from samples (rounds, requests).

Requests of a round share its disturbances, so the uncertainty of a figure is read from how its rounds differ,
not from the number of requests. Rounds of one launch of an engine share what its process happened to get, so
where there were at least 3 launches these are compared instead; `launches` says how many rounds each had, in
order, and is empty where there was one. What a round or launch does to a figure is its influence: how far it
alone moves the figure. Two things follow:

* A ratio of two engines is paired: a ratio for each round, and what slowed a whole round of both cancels.
* Few rounds or launches know little about their own spread, which Student's t allows for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.interval import Interval

CONFIDENCE = 0.95
_EARLY_STOPPING = 1 - 0.99  # the chance that loadgen lets a percentile be quoted too early
_LEAST_LAUNCHES = 3  # fewer say too little about how they differ
_RARE = 0.9  # beyond this level so few requests of a round lie that they hardly show how rounds differ


def samples_needed(level: float) -> int:
    """How many samples the quantile `level` needs before it may be quoted: 64 for p90, 662 for p99.

    The early-stopping rule of MLPerf's loadgen with one overlatency allowed: the smallest n for which at most
    one of n samples lies beyond the quantile with probability <= 1 % (binomial), as described in the MLPerf
    Inference Rules, "Early Stopping".
    """
    n = 2
    while level**n + n * (1 - level) * level ** (n - 1) > _EARLY_STOPPING:
        n += 1
    return n


def allowed_overlatencies(queries: int, level: float) -> int:
    """The largest t for which t overlatencies in `queries` show that the quantile `level` is met; -1 if none.

    By MLPerf's "Early Stopping Criterion": so few would be seen in less than 1 case of 100 if the quantile
    were larger. P(X <= t) < 1 % for X ~ Binomial(`queries`, 1 - `level`): 1 of 64 for p90; for p99, 0 of 459
    and 1 of 662.
    """
    from scipy import special  # what of scipy is quick to import

    so_few = special.bdtr(np.arange(queries + 1), queries, 1 - level)
    return int(np.searchsorted(so_few, _EARLY_STOPPING)) - 1


def early_stopping_bound(latencies: Sequence[float], level: float) -> float | None:
    """What the quantile `level` is below with 99 % confidence: the t-th largest latency, as loadgen has it.

    None if there are too few: not even one overlatency would be allowed.
    """
    allowed = allowed_overlatencies(len(latencies), level)
    return sorted(latencies)[-allowed] if allowed >= 1 else None


def quantile(samples: NDArray[np.float64], level: float, launches: Sequence[int] = ()) -> Interval:
    """The nearest-rank quantile `level` of all `samples` (at least 6 rounds, requests) with its interval.

    Samples that are NaN do not count; each round has some that do.

    Woodruff's interval (1952, JASA 47:635-646) for samples in clusters: an interval of the share that lies
    beyond the estimate, carried back through the sample's own quantiles. It needs no density, is as skewed as
    the tail is, and spans a gap between two modes. The share's interval is Wilson's, with the sample's size
    divided by the design effect and z replaced by t (Franco et al. 2019, J. Surv. Stat. Methodol. 7:334-364).
    Requests are whole, so it is corrected for continuity (Newcombe 1998, Statist. Med. 17:857-872, method 4).
    """
    known = samples[np.isfinite(samples)]
    value = _nearest_rank(known, level)
    t = student_t(0.5 + CONFIDENCE / 2, _degrees(len(samples), launches))
    # An effect below that of independent requests is luck: nothing makes rounds more alike than chance does.
    effective = known.size / max(_design_effect(samples, known, level, launches), 1.0)
    beyond = _score_interval(1 - level, effective, t, corrected=True)
    # Between the two nearest samples.
    low, high = np.quantile(known, (1 - beyond.high, 1 - beyond.low), method="hazen").tolist()
    return Interval(value=value, low=min(low, value), high=max(high, value))


def median(of_rounds: NDArray[np.float64], launches: Sequence[int] = ()) -> Interval:
    """The median over rounds (at least 6) of one figure of each.

    Of a ratio of two engines, too: both met the same machine, so what they have in common drops out of it.
    """
    return quantile(of_rounds[:, None], 0.5, launches)


def mixture(parts: Sequence[tuple[float, Interval]]) -> Interval:
    """The geometric mean of independent positive figures, each with its share; the shares add up to 1."""
    log_value = sum(share * math.log(part.value) for share, part in parts)
    down = math.hypot(*(share * math.log(part.value / part.low) for share, part in parts))
    up = math.hypot(*(share * math.log(part.high / part.value) for share, part in parts))
    value = math.exp(log_value)
    return Interval(value=value, low=value * math.exp(-down), high=value * math.exp(up))


def rate(amount_per_request: float, seconds: NDArray[np.float64], launches: Sequence[int] = ()) -> Interval:
    """Amount per second of all requests, one after the other, that took `seconds` (rounds, requests)."""
    influences = seconds.mean(axis=1) / seconds.mean() - 1
    t = student_t(0.5 + CONFIDENCE / 2, _degrees(len(seconds), launches))
    factor = float(np.exp(t * np.sqrt(_variance_of_mean(influences, launches))))
    value = amount_per_request / float(seconds.mean())
    return Interval(value=value, low=value / factor, high=value * factor)


def geometric_mean(values: Sequence[float]) -> Interval:
    """That of at least two independent values with Student's 95 % interval, on the logarithm."""
    logs = [math.log(value) for value in values]
    half = student_t(0.5 + CONFIDENCE / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    centre = fmean(logs)
    return Interval(value=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half))


def wilson(share: float, trials: int) -> Interval:
    """`share` of `trials` with the 95 % score interval of Wilson (1927, JASA 22:209-212)."""
    return _score_interval(share, trials, NormalDist().inv_cdf(0.5 + CONFIDENCE / 2))


def student_t(level: float, degrees: int) -> float:
    """The quantile `level` of Student's t."""
    from scipy import special  # what of scipy is quick to import

    return float(special.stdtrit(degrees, level))


# ------------------------------------------------------------------------------------- how the rounds differ


def _compared(rounds: int, launches: Sequence[int]) -> NDArray[np.int64]:
    """How many rounds each of the things has that are compared: the launches, or each round for itself."""
    return np.array(launches if len(launches) >= _LEAST_LAUNCHES else [1] * rounds)


def _degrees(rounds: int, launches: Sequence[int]) -> int:
    """Degrees of freedom that are left of what is compared without its mean."""
    return len(_compared(rounds, launches)) - 1


def _variance_of_mean(influences: NDArray[np.float64], launches: Sequence[int]) -> float:
    """The variance of the mean of `influences` (rounds,)."""
    sizes = _compared(len(influences), launches)
    weights = sizes / sizes.sum()
    means = np.add.reduceat(influences, np.cumsum(sizes) - sizes) / sizes
    residuals = means - weights @ means
    return float(((weights * residuals) ** 2).sum()) * len(sizes) / _degrees(len(influences), launches)


def _design_effect(
    samples: NDArray[np.float64], known: NDArray[np.float64], level: float, launches: Sequence[int]
) -> float:
    """How many times more the share beyond the quantile `level` varies than if requests were independent.

    At p99 half a request of 50 lies beyond: its own design effect is so uncertain, and so small when the
    share happens to be small, that intervals would miss one time in ten. There a quarter of it is that at
    p90: surveys pool the design effects of rare items, too (Wolter 2007, "Introduction to Variance
    Estimation", chapter 7).
    """

    def effect(at: float) -> float:
        beyond = (samples > _nearest_rank(known, at)).sum(axis=1)
        shares = beyond / np.isfinite(samples).sum(axis=1)  # of the requests of each round
        return _variance_of_mean(shares, launches) * known.size / (at * (1 - at))

    return 0.75 * effect(level) + 0.25 * effect(_RARE) if level > _RARE else effect(level)


def _nearest_rank(known: NDArray[np.float64], level: float) -> float:
    return float(np.quantile(known, level, method="inverted_cdf"))


def _score_interval(share: float, trials: float, z: float, *, corrected: bool = False) -> Interval:
    """Wilson's interval. corrected: for continuity, by half a trial."""
    step = 0.5 / trials if corrected else 0.0
    low = _score_end(max(share - step, 0.0), trials, -z)
    high = _score_end(min(share + step, 1.0), trials, z)
    return Interval(value=share, low=max(0.0, min(low, share)), high=min(1.0, max(high, share)))


def _score_end(share: float, trials: float, z: float) -> float:
    error = float(np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2)))
    return (share + z**2 / (2 * trials) + z * error) / (1 + z**2 / trials)
