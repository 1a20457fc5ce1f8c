"""The stage as a whole: roofs, what cannot be diagnosed, what is written."""

from __future__ import annotations

from typing import Any

import pytest

from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose.layers import Layer
from hpml.components.diagnose.roofs import Roofs, model_bound
from tests.components.diagnose.conftest import (
    Diagnose,
    MakeEngine,
    Network,
    interval,
    make_gpu_peaks,
    make_peaks,
)


def small() -> Network:
    return Network((16, 24, 24)).conv(32).conv(32).head()


def layer(**changes: Any) -> Layer:
    fields: dict[str, Any] = {
        "name": "conv",
        "op": "Conv",
        "precision": "fp32",
        "flops": 1_000_000,
        "weight_bytes": 100_000,
        "activation_bytes": 50_000,
        "time_us": 20.0,
    }
    return Layer(**{**fields, **changes})


@pytest.fixture(scope="module")
def stepped() -> PeaksSpec:
    """100 Gflop/s; 400, 200, 50 and 10 GB/s in the levels of the memory."""
    rates = {"L1": 400.0, "L2": 200.0, "L3": 50.0, "DRAM": 10.0}
    spec = make_peaks(gflop_per_s=100.0)
    points = (
        point.model_copy(update={"gb_per_s": interval(rates[point.level])}) for point in spec.bandwidths
    )
    return spec.model_copy(update={"bandwidths": tuple(points)})


@pytest.mark.parametrize(
    ("size", "gb_per_s"),
    [(1_000, 400), (32_000, 400), (32_001, 200), (1_000_000, 200), (2_000_000, 50), (10**12, 10)],
)
def test_bytes_come_from_the_smallest_level_that_holds_them(
    stepped: PeaksSpec, size: int, gb_per_s: float
) -> None:
    assert Roofs(stepped, threads=2).gb_per_s(size) == gb_per_s


def test_a_layer_under_the_roofs(stepped: PeaksSpec) -> None:
    roofs = Roofs(stepped, threads=2)
    judged = roofs.judge(layer(), all_weight_bytes=5_000_000)
    assert judged.compute_us == pytest.approx(10.0)
    # activations of 50 kB from L2, weights from L3, where those of the whole engine are
    assert judged.memory_us == pytest.approx(50_000 / 200e3 + 100_000 / 50e3)
    assert judged.roof_us == pytest.approx(10.0)
    assert judged.share_of_roof == pytest.approx(0.5)
    assert judged.bound == "compute"
    assert roofs.judge(layer(time_us=21.0), all_weight_bytes=0).bound == "overhead"
    assert roofs.judge(layer(flops=100, time_us=2.0), all_weight_bytes=5_000_000).bound == "memory"
    moving = roofs.judge(layer(flops=0, precision="bf16"), all_weight_bytes=0)  # no peak needed for bf16
    assert moving.share_of_roof is None and moving.roof_us == moving.memory_us


def test_what_is_faster_than_its_peak_has_no_share_of_it(stepped: PeaksSpec) -> None:
    """torch's matrix product picked AVX2 kernels, its convolutions did not: 1.75 of a peak is no share."""
    roofs = Roofs(stepped, threads=2)
    fast, slow = (roofs.judge(layer(time_us=time_us), all_weight_bytes=0) for time_us in (5.7, 20.0))
    assert fast.share_of_roof is None and fast.is_above_roof and fast.bound == "compute"
    assert slow.share_of_roof == pytest.approx(0.5) and not slow.is_above_roof


def test_a_looser_peak_stands_in_for_one_that_was_not_stable() -> None:
    alone = make_peaks(gflop_per_s=100.0, gb_per_s=30.0, threads=1)
    both = make_peaks(gflop_per_s=150.0, gb_per_s=40.0, threads=2)
    spec = alone.model_copy(
        update={
            "gemms": alone.gemms + tuple(_unstable(both.gemms, precision="fp32")),
            "bandwidths": tuple(_unstable(alone.bandwidths, level="DRAM"))
            + tuple(_unstable(_unstable(both.bandwidths, level="L3"), level="DRAM")),
        }
    )
    roofs = Roofs(spec, threads=2)
    assert roofs.gflop_per_s("fp32") == 200.0  # twice that of one thread
    assert roofs.gflop_per_s("int8") == 600.0
    assert roofs.gb_per_s(8_000_000) == 60.0  # likewise
    assert roofs.gb_per_s(10**9) == 60.0  # L3's, for DRAM was stable with no number of threads
    assert roofs.notes() == (
        "peaks of 2 threads not known: DRAM bandwidth",
        "peaks of 2 threads not stable, so 2 times that of one thread stands in: "
        "fp32 arithmetic, L3 bandwidth",
    )
    assert Roofs(both, threads=2).notes() == ()


def test_the_fastest_round_stands_in_where_no_thread_count_was_stable() -> None:
    spec = make_peaks(threads=2)
    gemms = tuple(point.model_copy(update={"gflop_per_s": None, "fastest": 123.0}) for point in spec.gemms)
    roofs = Roofs(spec.model_copy(update={"gemms": gemms}), threads=2)
    assert roofs.gflop_per_s("fp32") == 123.0
    assert roofs.notes() == (
        "peaks of 2 threads not stable, so its fastest round stands in: fp32 arithmetic, int8 arithmetic",
    )


def _unstable(points: Any, **which: str) -> list[Any]:
    """`points` without the rates of those that have the attributes `which`."""
    (key, value), *_ = which.items()
    return [
        point.model_copy(update={"gb_per_s" if hasattr(point, "level") else "gflop_per_s": None})
        if getattr(point, key) == value
        else point
        for point in points
    ]


def test_rates_of_signed_products_are_known_where_both_were_measured() -> None:
    spec = make_peaks()
    fp32, int8 = spec.gemms
    pair = [
        int8.model_copy(update={"library": f"onnxruntime (MLAS) {sign}", "gflop_per_s": interval(rate)})
        for sign, rate in (("U8S8", 400.0), ("S8S8", 35.0))
    ]
    assert Roofs(spec, threads=2).sign_rates() is None
    known = spec.model_copy(update={"gemms": (fp32, *pair)})
    assert Roofs(known, threads=2).sign_rates() == (35.0, 400.0)
    assert Roofs(known, threads=1).sign_rates() is None


def test_a_gpu_has_roofs_of_its_own() -> None:
    spec = make_gpu_peaks(gflop_per_s=1000.0, gb_per_s=500.0)
    cpu, gpu = Roofs(spec, threads=2), Roofs(spec, threads=2, device="cuda")
    assert (cpu.gflop_per_s("int8"), gpu.gflop_per_s("int8"), gpu.gflop_per_s("fp16")) == (400, 4000, 2000)
    assert (cpu.gflop_per_s("fp16"), gpu.gflop_per_s("bf16")) == (None, None)
    assert gpu.gb_per_s(1) == gpu.gb_per_s(10**12) == 500.0
    assert len(gpu.notes()) == 1 and "not of its caches" in gpu.notes()[0]
    without = spec.model_copy(update={"bandwidths": ()})
    assert Roofs(without, threads=2, device="cuda").gb_per_s(1) is None
    unstable = tuple(point.model_copy(update={"gflop_per_s": None, "fastest": 1.0}) for point in spec.gemms)
    noted = Roofs(spec.model_copy(update={"gemms": unstable}), threads=2, device="cuda").notes()
    assert noted[0] == (
        "peaks of the GPU not stable, so its fastest round stands in: "
        "fp32 arithmetic, fp16 arithmetic, int8 arithmetic"
    )


def test_without_a_peak_nothing_is_claimed(stepped: PeaksSpec) -> None:
    unknown = Roofs(stepped, threads=2).judge(layer(precision="bf16"), all_weight_bytes=0)
    other_threads = Roofs(stepped, threads=3).judge(layer(), all_weight_bytes=0)
    for judged in (unknown, other_threads):
        assert (judged.roof_us, judged.share_of_roof, judged.bound) == (None, None, None)
    assert model_bound((unknown,), 10.0) is None


def test_an_engine_without_peaks_still_has_its_layers(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    one = run_diagnosis({"fp32/onnx": make_engine(small())}, peaks=make_peaks(threads=7)).engines["fp32/onnx"]
    assert one.status == "diagnosed" and one.layers
    assert (one.roof_us, one.share_of_roof, one.bound) == (None, None, None)
    assert one.verdict.startswith("The machine has no stable peaks for 2 threads")


def test_what_is_written_adds_up(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    engines = {"fp32/onnx": make_engine(small())}
    fast = make_peaks(gflop_per_s=1e4)  # beyond any machine of these tests
    whole = run_diagnosis(engines, peaks=fast).engines["fp32/onnx"]
    assert whole.flops == sum(one.flops for one in whole.layers)
    assert whole.bytes == sum(one.bytes for one in whole.layers)
    assert whole.profiled_us == pytest.approx(sum(one.time_us for one in whole.layers), abs=0.01)
    assert whole.roof_us is not None and whole.share_of_roof is not None
    assert whole.share_of_roof == pytest.approx(whole.roof_us / whole.time_us, abs=1e-3)
    assert [one.name for one in whole.layers if one.op.endswith("Conv")] == ["conv0", "conv2"]

    few = run_diagnosis(engines, layers=2).engines["fp32/onnx"]
    assert {one.name for one in few.layers} == {"conv0", "conv2"}  # the slowest, in the order they run
    assert few.flops == whole.flops
    assert few.profiled_us > sum(one.time_us for one in few.layers)


def test_an_engine_faster_than_its_peaks_shows_no_share_of_them(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    said = run_diagnosis({"fp32/onnx": make_engine(small())}, peaks=make_peaks(gflop_per_s=1e-3))
    one = said.engines["fp32/onnx"]
    assert one.roof_us is not None and one.roof_us > one.time_us
    assert one.share_of_roof is None
    assert all(layer.share_of_roof is None for layer in one.layers if layer.flops)
    assert (
        one.verdict.startswith("compute-bound: ") and "peaks measured here, which are too low" in one.verdict
    )
    assert any("layers were faster than the peaks measured here" in note for note in said.notes)


def test_what_cannot_be_diagnosed_says_why(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    built = make_engine(small())
    engines = {
        "fp32/onnx": built,
        "gpu/onnx": make_engine(small(), identity={"device": "cuda"}),
        "gpu/eager": make_engine(small(), target="eager", identity={"device": "cuda H200"}),
        "absent/tensorrt": make_engine(small(), missing="this machine has no NVIDIA GPU"),
    }
    times_us = {"gpu/onnx": 10.0, "gpu/eager": 10.0}
    diagnosis = run_diagnosis(engines, time_us=times_us)
    reasons = {name: one.reason for name, one in diagnosis.engines.items()}
    assert reasons["fp32/onnx"] == ""
    assert "not how long it runs" in reasons["gpu/onnx"]
    assert reasons["gpu/eager"] == "it runs on cuda H200, and layers of eager are timed on the CPU only"
    assert reasons["absent/tensorrt"] == "not built: this machine has no NVIDIA GPU"
    busy = "machine busy (26 of 645 slices were quiet)"
    engines = {"fp32/onnx": built, "twin/onnx": built}
    partly = run_diagnosis(engines, not_measured={"twin/onnx": busy}).engines
    assert partly["fp32/onnx"].status == "diagnosed" and partly["twin/onnx"].status == "not diagnosed"
    assert partly["twin/onnx"].reason == f"not measured: {busy}"


def test_each_engine_is_diagnosed_with_the_threads_that_it_was_measured_with(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    built = make_engine(small())
    engines = {"fp32/onnx": built, "twin/onnx": built}
    said = run_diagnosis(engines, settings={"twin/onnx": EngineSettings(threads=1)})
    assert [one.threads for one in said.engines.values()] == [2, 1]
    assert said.engines["fp32/onnx"].roof_us and said.engines["twin/onnx"].roof_us is None
    assert any(note.startswith("peaks of one thread not known") for note in said.notes)


def test_an_engine_that_a_runtime_cannot_open_costs_the_others_nothing(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    broken = make_engine(small(), target="eager", identity={"device": "cpu model 1"})
    engines = {"fp32/onnx": make_engine(small()), "broken/eager": broken}
    diagnosis = run_diagnosis(engines, time_us={"broken/eager": 10.0})
    assert diagnosis.engines["fp32/onnx"].status == "diagnosed"
    one = diagnosis.engines["broken/eager"]
    assert one.status == "not diagnosed" and one.reason.startswith("ValidationError")


def test_of_a_layer_too_short_to_be_timed_nothing_is_claimed(stepped: PeaksSpec) -> None:
    judged = Roofs(stepped, threads=2).judge(layer(time_us=0.0), all_weight_bytes=0)
    assert (judged.bound, judged.share_of_roof, judged.excess_us) == (None, None, 0.0)


def test_a_network_faster_than_the_profilers_clock_is_diagnosed_as_a_whole(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    engine = make_engine(Network((1, 2, 2)).head())
    diagnosis = run_diagnosis({"fp32/onnx": engine}, time_us={"fp32/onnx": 4.6})
    one = diagnosis.engines["fp32/onnx"]
    assert one.status == "diagnosed" and one.bound == "overhead"
    short = [one_layer for one_layer in one.layers if not one_layer.time_us]
    assert not any(one_layer.bound or one_layer.share_of_roof for one_layer in short)
    told = any("too short for ONNX Runtime's profile" in note for note in diagnosis.notes)
    assert told == bool(short)
