"""Figures of latencies that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.benchmark.accuracy import paired_accuracies
from components.benchmark.figures import LEVELS, best_fp32, figures, timings
from components.benchmark.statistics import quantile

Engines = dict[str, Artifact[EngineSpec]]
REFERENCE = "fp32/eager"


def _steady(latency_ms: float) -> dict[int, np.ndarray]:
    return {1: np.full((20, 50), latency_ms)}


def test_the_best_fp32_engine_is_unmodified_and_not_the_reference(digits_engines: Engines) -> None:
    latencies = {REFERENCE: _steady(1.0), "fp32/onnx": _steady(2.0), "int8/onnx": _steady(0.5)}
    assert best_fp32(digits_engines, latencies, reference=REFERENCE) == "fp32/onnx"
    del latencies["fp32/onnx"]
    assert best_fp32(digits_engines, latencies, reference=REFERENCE) == ""


def test_steady_latencies_have_no_uncertainty(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    latencies = {REFERENCE: _steady(3.0), "fp32/onnx": _steady(2.0), "int8/onnx": _steady(0.5)}
    found = figures(
        digits_engines,
        latencies,
        data=digits_data.spec,
        paired={},
        batch_sizes=(1,),
        reference=REFERENCE,
        fastest_fp32="fp32/onnx",
    )["int8/onnx"]
    for interval, value in (
        (found.latency_ms_p99, 0.5),
        (found.speedup_vs_reference, 6.0),
        (found.speedup_vs_best_fp32, 4.0),
        (found.throughput[0].images_per_s, 2000.0),
    ):
        assert interval is not None
        assert [interval.low, interval.value, interval.high] == pytest.approx([value] * 3)
    assert found.round_spread == 0


def test_a_percentile_is_bounded_from_below_by_the_smaller_ones() -> None:
    """What is slow is all in one round: that leaves p90 so uncertain that alone it would reach below p50."""
    latency_ms = np.random.default_rng(0).lognormal(0, 0.05, (5, 140))
    latency_ms[1, :70] *= 3
    assert quantile(latency_ms, 0.9).low < quantile(latency_ms, 0.5).low
    found = _timed({REFERENCE: {1: latency_ms}})[REFERENCE]
    p50, p90, p99 = (found[figure] for figure in LEVELS)
    assert p50.low == p90.low <= p99.low <= p99.value <= p99.high


def test_percentiles_without_the_samples_say_what_they_miss() -> None:
    found = _timed({REFERENCE: {1: np.random.default_rng(0).lognormal(0, 0.05, (5, 3))}})[REFERENCE]
    assert found["unquoted"] == {
        "latency_ms_p90": "15 of 64 samples",
        "latency_ms_p99": "15 of 662 samples",
    }
    assert "latency_ms_p50" in found


def _timed(latencies: dict[str, dict[int, np.ndarray]]) -> dict[str, dict[str, Any]]:
    return timings(latencies, batch_sizes=(), reference=REFERENCE, fastest_fp32="")


def test_each_engine_but_the_reference_carries_its_paired_accuracy(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    paired = paired_accuracies(digits_engines, digits_data, reference=REFERENCE)
    found = figures(
        digits_engines,
        {name: _steady(1.0) for name in digits_engines},
        data=digits_data.spec,
        paired=paired,
        batch_sizes=(),
        reference=REFERENCE,
        fastest_fp32="fp32/onnx",
    )
    assert found[REFERENCE].paired is None
    assert found["int8/onnx"].paired == paired["int8/onnx"]
    accuracy = {name: engine.accuracy_top1 for name, engine in found.items()}
    assert accuracy["int8/onnx"].value - accuracy[REFERENCE].value == pytest.approx(
        paired["int8/onnx"].top1_change.value
    )
