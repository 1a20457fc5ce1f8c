"""Intervals hold the truth as often as they say, and what the rounds do not agree on is not quoted."""

from __future__ import annotations

import numpy as np
import pytest

from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, PeaksSpec
from hpml.components.peaks.rounds import figure
from hpml.measuring.statistics import geometric_mean


@pytest.mark.parametrize("rounds", [5, 7, 20])
def test_intervals_hold_the_truth_95_times_in_100(rounds: int) -> None:
    draws = np.exp(np.random.default_rng(1).normal(np.log(100), 0.05, (1000, rounds)))
    held = [found.low <= 100 <= found.high for found in (geometric_mean(list(rates)) for rates in draws)]
    assert 0.92 <= np.mean(held) <= 0.98


def test_rounds_that_agree_give_a_figure() -> None:
    interval, reason = figure([98, 100, 101, 99, 102], max_spread=0.1)
    assert reason == "" and interval is not None
    assert interval.low < 98.5 < interval.value < 101.5 < interval.high


def test_rounds_that_differ_give_the_reason_instead() -> None:
    assert figure([100, 100, 120, 125, 110], max_spread=0.1) == (
        None,
        "not stable: rounds differ by 18 %",
    )


def test_one_round_that_was_disturbed_makes_the_interval_too_wide() -> None:
    interval, reason = figure([100, 101, 100, 99, 100, 100, 40], max_spread=0.1)
    assert interval is None and reason.startswith("not stable: the 95 % interval is ")


def bandwidth(value: float | None, fastest: float | None = None) -> BandwidthPoint:
    rate = Interval(value=value, low=value, high=value) if value else None
    return BandwidthPoint(
        device="cpu",
        kernel="triad",
        threads=1,
        working_set_bytes=1,
        level="L1",
        gb_per_s=rate,
        fastest=fastest,
    )


@pytest.mark.parametrize(
    ("points", "peak"),
    [
        ([bandwidth(90), bandwidth(100), bandwidth(95)], 100),
        ([bandwidth(100), bandwidth(None, fastest=105)], 100),
        ([bandwidth(100), bandwidth(None, fastest=150)], None),  # exceeded: it is no peak
        ([bandwidth(None, fastest=150)], None),
        ([], None),
    ],
)
def test_what_was_exceeded_is_no_peak(points: list[BandwidthPoint], peak: float | None) -> None:
    spec = PeaksSpec(hardware={}, bandwidths=tuple(points), gemms=())
    found = spec.bandwidth("L1", threads=1)
    assert (found.value if found else None) == peak
