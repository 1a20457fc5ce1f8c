"""Intervals hold the truth as often as they claim, and ratios cancel what hit both engines."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from components.benchmark.statistics import (
    interval,
    quantiles,
    rates,
    round_weights,
    samples_needed,
    student_t,
    wilson,
)

LEVELS = (0.5, 0.9, 0.99)
latencies = arrays(
    np.float64, st.tuples(st.integers(5, 9), st.integers(1, 12)), elements=st.floats(1e-3, 1e3)
)


def test_samples_needed_are_those_of_loadgens_early_stopping() -> None:
    assert [samples_needed(level) for level in (0.9, 0.99, 0.999)] == [64, 662, 6636]


@pytest.mark.parametrize(("degrees", "table"), [(4, 2.776), (9, 2.262), (19, 2.093), (49, 2.010)])
def test_student_t_agrees_with_the_table(degrees: int, table: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(table, rel=0.005)


@pytest.mark.parametrize(
    ("share", "trials", "low", "high"),
    [(0.98, 1000, 0.9693, 0.9870), (1.0, 100, 0.9630, 1.0), (0.0, 10, 0, 0.2775)],
)
def test_wilson(share: float, trials: int, low: float, high: float) -> None:
    found = wilson(share, trials)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)
    assert found.low <= found.value <= found.high


@given(latencies, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_quantiles_are_those_of_the_drawn_rounds_put_together(samples: np.ndarray, seed: int) -> None:
    weights = round_weights(len(samples), seed=seed, draws=20)
    found = quantiles(samples, weights, LEVELS)
    for draw, counts in enumerate(weights):
        pooled = np.repeat(samples, counts, axis=0)
        expected = np.quantile(pooled, LEVELS, method="inverted_cdf")
        np.testing.assert_array_equal(found[:, draw], expected)


@given(latencies, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_an_interval_holds_its_value_and_turns_over_with_the_ratio(samples: np.ndarray, seed: int) -> None:
    rounds = len(samples)
    weights = round_weights(rounds, seed=seed, draws=50)
    one, other = quantiles(samples, weights, (0.5,))[0], quantiles(samples[::-1] * 3, weights, (0.5,))[0]
    ratio, inverse = interval(one / other, rounds=rounds), interval(other / one, rounds=rounds)
    assert ratio.low <= ratio.value <= ratio.high
    assert inverse.low == pytest.approx(1 / ratio.high)
    assert inverse.high == pytest.approx(1 / ratio.low)


def test_an_engine_against_itself_is_exactly_as_fast() -> None:
    samples = np.random.default_rng(0).lognormal(0, 0.5, (20, 50))
    p50 = quantiles(samples, round_weights(20, seed=0), (0.5,))[0]
    found = interval(p50 / p50, rounds=20)
    assert (found.low, found.value, found.high) == (1, 1, 1)


def test_many_samples_are_resampled_in_bounded_memory() -> None:
    samples = np.random.default_rng(0).lognormal(0, 0.1, (10, 50_000))
    found = quantiles(samples, round_weights(10, seed=0, draws=100), LEVELS)
    np.testing.assert_array_equal(found[:, 0], np.quantile(samples, LEVELS, method="inverted_cdf"))


def test_a_rate_is_all_images_over_all_seconds() -> None:
    seconds = np.array([[0.1, 0.3], [0.2, 0.2], [0.4, 0.4], [0.1, 0.1], [0.1, 0.1]])
    weights = np.array([[1, 1, 1, 1, 1], [5, 0, 0, 0, 0]])
    np.testing.assert_allclose(rates(8, seconds, weights), [8 * 10 / 2.0, 8 * 10 / 2.0])
    assert rates(8, seconds, np.array([[0, 0, 5, 0, 0]]))[0] == pytest.approx(20)


# ------------------------------------------------------------------------------------------------- coverage

DRAWS = 300
# 95 % of 300 draws, less three standard errors: a right method fails this once in a thousand times.
LEAST = 0.95 - 3 * (0.95 * 0.05 / DRAWS) ** 0.5


def _lognormal(rng: np.random.Generator, rounds: int, requests: int, round_sigma: float) -> np.ndarray:
    within = rng.normal(0, 0.25, (rounds, requests))
    return np.exp(within + rng.normal(0, round_sigma, (rounds, 1)))


@pytest.mark.parametrize(
    ("rounds", "requests", "round_sigma"), [(5, 140, 0.0), (20, 50, 0.0), (20, 50, 0.05)]
)
def test_intervals_cover_the_truth(rounds: int, requests: int, round_sigma: float) -> None:
    rng = np.random.default_rng(2)
    sigma = (0.25**2 + round_sigma**2) ** 0.5
    truth = np.exp(sigma * np.array([NormalDist().inv_cdf(level) for level in (0.5, 0.9)]))
    held = np.zeros(2)
    for seed in range(DRAWS):
        weights = round_weights(rounds, seed=seed, draws=300)
        draws = quantiles(_lognormal(rng, rounds, requests, round_sigma), weights, (0.5, 0.9))
        for index in range(2):
            found = interval(draws[index], rounds=rounds)
            held[index] += found.low <= truth[index] <= found.high
    assert (held / DRAWS >= LEAST).all(), held / DRAWS


def test_a_paired_ratio_covers_the_truth_and_is_narrower_than_an_unpaired_one() -> None:
    """Both engines are slowed by the same rounds, as on a busy machine."""
    rng = np.random.default_rng(3)
    held, paired_width, unpaired_width = 0, 0.0, 0.0
    for seed in range(DRAWS):
        slowed = np.exp(rng.normal(0, 0.3, (20, 1)))
        fast, slow = (median * slowed * _lognormal(rng, 20, 50, 0.0) for median in (1.0, 2.0))
        weights, others = (
            round_weights(20, seed=seed, draws=300),
            round_weights(20, seed=seed + 999, draws=300),
        )
        fast_p50 = quantiles(fast, weights, (0.5,))[0]
        paired = interval(quantiles(slow, weights, (0.5,))[0] / fast_p50, rounds=20)
        unpaired = interval(quantiles(slow, others, (0.5,))[0] / fast_p50, rounds=20)
        held += paired.low <= 2.0 <= paired.high
        paired_width += paired.high - paired.low
        unpaired_width += unpaired.high - unpaired.low
    assert held / DRAWS >= LEAST
    assert paired_width < 0.5 * unpaired_width
