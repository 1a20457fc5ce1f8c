"""Figures of latencies that are known."""

from __future__ import annotations

import numpy as np
import pytest

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.benchmark.figures import best_fp32, figures

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
        batch_sizes=(1,),
        reference=REFERENCE,
        fastest_fp32="fp32/onnx",
        seed=0,
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


def test_a_percentile_is_bounded_from_below_by_the_smaller_ones(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    """A few rounds that were torn away make p99 so uncertain that alone it would reach below the median."""
    rng = np.random.default_rng(0)
    torn = rng.lognormal(0, 0.05, (20, 50))
    torn[:2, :6] *= 200
    found = figures(
        digits_engines,
        {REFERENCE: {1: torn}},
        data=digits_data.spec,
        batch_sizes=(),
        reference=REFERENCE,
        fastest_fp32="",
        seed=0,
    )[REFERENCE]
    p50, p90, p99 = found.latency_ms_p50, found.latency_ms_p90, found.latency_ms_p99
    assert p50 is not None and p90 is not None and p99 is not None
    assert p50.low <= p90.low <= p99.low <= p99.value <= p99.high
