"""Figures of latencies that are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import Conditions, EngineFigures, EngineSettings, MeasurementsSpec
from hpml.components.benchmark.measure import described
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.figures import LEVELS, best_fp32, timings
from hpml.measuring.paired import compared, subject_name
from hpml.measuring.quality import judged_engines, paired_quality
from hpml.measuring.resources import LaunchRecord
from hpml.measuring.rounds import Round, Rounds
from hpml.measuring.statistics import quantile
from hpml.measuring.timed import Timed

Engines = dict[str, Artifact[EngineSpec]]
REFERENCE = "fp32/eager"


def _rounds(latencies: dict[str, np.ndarray]) -> Rounds:
    """Rounds at batch 1 of these milliseconds (rounds, requests)."""
    count = len(next(iter(latencies.values())))
    return Rounds(
        Round(
            batch=1,
            launch=index // 5,
            at_s=float(index),
            seconds=0.2,
            round_trip_ns=(math.nan, math.nan),
            latency_ms={name: latency_ms[index] for name, latency_ms in latencies.items()},
        )
        for index in range(count)
    )


def _steady(latency_ms: float) -> np.ndarray:
    return np.full((20, 50), latency_ms)


def _timed(latencies: dict[str, np.ndarray], fastest_fp32: str = "") -> dict[str, dict[str, Any]]:
    config = BenchmarkConfig(reference=REFERENCE, batch_sizes=(1,))
    return timings(_rounds(latencies), config, list(latencies), fastest_fp32=fastest_fp32, busy="busy")


def _described(
    engines: Engines, data: Artifact[DatasetSpec], rounds: Rounds, fastest_fp32: str = ""
) -> dict[str, EngineFigures]:
    measurements = MeasurementsSpec(
        reference=REFERENCE,
        best_fp32="",
        engines={},
        rounds=0,
        threads=1,
        seed=0,
        environment={},
        conditions=Conditions(slices=2, dropped=2),
    )
    timed = Timed(
        rounds,
        told=dict.fromkeys(engines, LaunchRecord()),
        settings=dict.fromkeys(engines, EngineSettings(threads=1)),
        measurements=measurements,
    )
    config = BenchmarkConfig(reference=REFERENCE, batch_sizes=(1,))
    return described(config, engines, data, timed, fastest_fp32)


def test_the_best_fp32_engine_is_unmodified_and_not_the_reference(digits_engines: Engines) -> None:
    latencies = {REFERENCE: _steady(1.0), "fp32/onnx": _steady(2.0), "int8/onnx": _steady(0.5)}
    rounds, names = _rounds(latencies), list(latencies)
    assert best_fp32(digits_engines, rounds, names, reference=REFERENCE) == "fp32/onnx"
    assert best_fp32(digits_engines, rounds, [REFERENCE, "int8/onnx"], reference=REFERENCE) == ""
    assert best_fp32(digits_engines, Rounds(), names, reference=REFERENCE) == ""


def test_steady_latencies_have_no_uncertainty(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    latencies = {REFERENCE: _steady(3.0), "fp32/onnx": _steady(2.0), "int8/onnx": _steady(0.5)}
    found = _described(digits_engines, digits_data, _rounds(latencies), "fp32/onnx")["int8/onnx"]
    assert found.status == "measured"
    for interval, value in (
        (found.latency_ms_p99, 0.5),
        (found.speedup_vs_reference, 6.0),
        (found.speedup_vs_best_fp32, 4.0),
        (found.throughput[0].rows_per_s, 2000.0),
    ):
        assert interval is not None
        assert [interval.low, interval.value, interval.high] == pytest.approx([value] * 3)
    assert found.round_spread == 0


def test_an_engine_without_rounds_has_its_accuracy_and_the_reason(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    busy = "machine busy (0 of 2 slices were quiet)"
    for engine in _described(digits_engines, digits_data, Rounds()).values():
        assert (engine.status, engine.reason) == ("not measured", busy)
        assert engine.quality["accuracy_top1"].value > 0.9 and not engine.throughput and not engine.samples
        assert set(engine.unquoted.values()) == {busy}


def test_an_operation_is_compared_within_itself() -> None:
    latencies = {REFERENCE: _steady(1.0), "fp32/onnx": _steady(0.5), "int8/onnx": _steady(0.25)}
    latencies |= {subject_name(name, "prefill"): 10 * latency_ms for name, latency_ms in latencies.items()}
    latencies[subject_name("int8/onnx", "prefill")] = _steady(5.0)
    found = _timed(latencies, "fp32/onnx")
    decode, prefill = found["int8/onnx"], found[subject_name("int8/onnx", "prefill")]
    assert (decode["speedup_vs_reference"].value, decode["speedup_vs_best_fp32"].value) == (4.0, 2.0)
    assert (prefill["speedup_vs_reference"].value, prefill["speedup_vs_best_fp32"].value) == (2.0, 1.0)
    pairs = compared(_rounds(latencies), list(latencies), precision=0.05)["pairs"]
    assert len(pairs) == 6  # three engines in two operations
    assert {("::" in one.engine) == ("::" in one.baseline) for one in pairs} == {True}


def test_a_speed_that_is_not_known_says_why() -> None:
    unsteady = np.random.default_rng(0).lognormal(0, 2, (20, 1)) * np.ones((20, 50))
    found = _timed({REFERENCE: _steady(1.0), "int8/onnx": unsteady})["int8/onnx"]
    assert found["speedup_vs_reference"] is None and found["latency_ms_p50"]
    assert "only, 5% is allowed" in found["unquoted"]["speedup_vs_reference"]


def test_a_slice_with_a_disturbed_request_counts_for_p50_and_not_for_the_tail() -> None:
    latency_ms = np.random.default_rng(0).lognormal(0, 0.05, (40, 50))
    touched = latency_ms.copy()
    touched[:20, 0] = np.nan
    whole, part = (_timed({REFERENCE: one})[REFERENCE] for one in (latency_ms, touched))
    assert part["samples"] == 1980 and whole["samples"] == 2000
    assert part["latency_ms_p50"].value == pytest.approx(whole["latency_ms_p50"].value, rel=0.01)
    tail = _timed({REFERENCE: latency_ms[20:]})[REFERENCE]
    assert part["latency_ms_p90"].value == tail["latency_ms_p90"].value
    mostly = latency_ms.copy()
    mostly[:38, 0] = np.nan
    found = _timed({REFERENCE: mostly})[REFERENCE]
    assert found["unquoted"] == {"latency_ms_p90": "busy", "latency_ms_p99": "busy"}
    assert found["throughput"] == ()


def test_a_percentile_is_bounded_from_below_by_the_smaller_ones() -> None:
    """The rounds without any disturbed request, of which p90 is, happened to be the fast ones."""
    latency_ms = np.random.default_rng(0).lognormal(0, 0.05, (40, 140))
    latency_ms[8:] *= 1.2
    latency_ms[8:, 0] = np.nan
    assert quantile(latency_ms[:8], 0.9).low < quantile(latency_ms, 0.5).low
    found = _timed({REFERENCE: latency_ms})[REFERENCE]
    p50, p90, p99 = (found[figure] for figure in LEVELS)
    assert p50.low == p90.low <= p99.low <= p99.value <= p99.high


def test_percentiles_without_the_samples_say_what_they_miss() -> None:
    found = _timed({REFERENCE: np.random.default_rng(0).lognormal(0, 0.05, (6, 3))})[REFERENCE]
    assert found["unquoted"] == {
        "latency_ms_p90": "18 of 64 samples",
        "latency_ms_p99": "18 of 662 samples",
    }
    assert "latency_ms_p50" in found


def test_each_engine_but_the_reference_carries_its_paired_quality(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    judged = judged_engines(digits_engines, digits_data)
    labels = np.load(digits_data.file("validation_labels.npy"))
    paired = paired_quality(judged["int8/onnx"], judged[REFERENCE], labels)
    rounds = _rounds({name: _steady(1.0) for name in digits_engines})
    found = _described(digits_engines, digits_data, rounds, "fp32/onnx")
    assert found[REFERENCE].paired is None
    assert found["int8/onnx"].paired == paired
    accuracy = {name: engine.quality["accuracy_top1"] for name, engine in found.items()}
    assert accuracy["int8/onnx"].value - accuracy[REFERENCE].value == pytest.approx(
        paired.change["accuracy_top1"].value
    )
