"""Drift is found where there is some, and seldom where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.benchmark.drift import drift
from tests.measure_coverage import DEFAULT_SHAPE, DRIFTS, ERROR_RATE, LAUNCHED_SHAPE, Shape, drift_found

DRAWS = 1000
STEADY = ["lognormal, rounds differ", "autocorrelated (0.6), rounds differ", "bursts"]
DRIFTING = ["up by 10 % steadily", "down by 10 % steadily", "up by 10 % in the middle"]


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("shape", [DEFAULT_SHAPE, Shape(5, 140), Shape(33, 20)], ids=str)
def test_a_run_without_drift_is_seldom_suspected(name: str, shape: Shape) -> None:
    found, _, _ = drift_found(name, shape, DRAWS)
    assert found <= ERROR_RATE + 3 * (ERROR_RATE / DRAWS) ** 0.5


@pytest.mark.parametrize("name", DRIFTING)
def test_drift_by_a_tenth_is_found_and_sized(name: str) -> None:
    found, _, change = drift_found(name, DEFAULT_SHAPE, DRAWS)
    assert found >= 0.95
    assert change == pytest.approx(-0.1 if name.startswith("down") else 0.1, abs=0.01)


@pytest.mark.parametrize("first", [6, 10, 14])
def test_a_step_is_found_wherever_it_is(first: int) -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        level = np.where(np.arange(20) >= first, 1.1, 1.0)[:, None]
        found.append(drift(level * rng.lognormal(0, 0.05, (20, 50)) * rng.lognormal(0, 0.015, (20, 1))))
    assert np.mean([one.p_value <= ERROR_RATE for one in found]) >= 0.95
    assert np.median([one.change for one in found]) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("name", STEADY[::2])
def test_launches_that_differ_by_two_percent_make_no_large_drift(name: str) -> None:
    """They look like steps, so they are often found; but they are small."""
    _, large, _ = drift_found(name, LAUNCHED_SHAPE, DRAWS)
    assert large <= 0.02


def test_a_step_that_is_certain_is_sized_exactly() -> None:
    latency_ms = np.repeat([[1.0], [1.25]], 10, axis=0) * np.ones((20, 3))
    found = drift(latency_ms)
    assert found.change == pytest.approx(0.25)
    assert found.p_value == pytest.approx(1e-4)


def test_a_steady_engine_does_not_drift() -> None:
    found = drift(np.full((20, 50), 3.7))
    assert (found.change, found.p_value) == (0, 1)


@given(st.integers(5, 60), st.integers(0, 1000))
def test_the_order_of_requests_in_a_round_and_the_unit_do_not_matter(rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    latency_ms = rng.lognormal(0, 0.2, (rounds, 9))
    found, other = drift(latency_ms), drift(1e3 * rng.permuted(latency_ms, axis=1))
    assert 0 < found.p_value <= 1
    assert other.change == pytest.approx(found.change)
    assert other.p_value == pytest.approx(found.p_value, abs=2e-4)


def test_many_rounds_are_judged_in_little_time_and_memory() -> None:
    rng = np.random.default_rng(0)
    levels = np.linspace(1.0, 1.02, 10_000)[:, None]
    found = drift(levels * rng.lognormal(0, 0.05, (10_000, 3)))
    assert found.p_value <= ERROR_RATE
    assert found.change == pytest.approx(0.02, abs=0.005)


def test_every_stream_is_steady_or_drifting_or_hard() -> None:
    assert set(STEADY) | set(DRIFTING) <= set(DRIFTS)
