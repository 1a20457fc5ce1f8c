"""The stage, run for real with few points: every point has a figure or a reason, the samples are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.folder import Artifact
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.peaks import measure
from hpml.components.peaks import stage as peaks
from hpml.components.peaks.config import PeaksConfig
from hpml.core.contract import Output, validate
from hpml.core.errors import ConfigInvalid
from hpml.core.hardware import usable_cpus
from hpml.measuring.config import Quiet
from hpml.measuring.machine.watch import Slice, Watch

CONFIG = PeaksConfig(threads=tuple({1, usable_cpus()}), gemm_sizes=(64, 128), rounds=5, time_budget_s=3)


@pytest.fixture(scope="module")
def measured(run_stage_once: Any) -> Artifact[PeaksSpec]:
    """With little memory, so without DRAM where the last cache is large: the whole chain measures that."""
    affinity = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_MEMORY_SHARE", 1e-2)
        artifact: Artifact[PeaksSpec] = run_stage_once(peaks.run, CONFIG)
    assert os.sched_getaffinity(0) == affinity
    return artifact


def test_every_point_has_a_figure_or_a_reason(measured: Artifact[PeaksSpec]) -> None:
    spec = measured.spec
    assert spec.bandwidths and spec.gemms
    for point in (*spec.bandwidths, *spec.gemms):
        assert (point.rate is None) == bool(point.reason), point
        assert (point.fastest is not None) == point.reason.startswith("not stable: "), point
        if point.rate:
            width = (point.rate.high - point.rate.low) / point.rate.value
            assert 0 < width <= CONFIG.max_spread


def test_one_thread_and_all_are_measured_with_the_same_points(measured: Artifact[PeaksSpec]) -> None:
    spec = measured.spec
    assert {point.threads for point in spec.bandwidths} == {1, usable_cpus()}
    assert {point.threads for point in spec.gemms} == {1, usable_cpus()}
    by_threads = [
        {(point.precision, point.library, point.size) for point in spec.gemms if point.threads == threads}
        for threads in (1, usable_cpus())
    ]
    assert by_threads[0] == by_threads[1]


def test_the_samples_are_those_of_the_points(measured: Artifact[PeaksSpec]) -> None:
    samples = json.loads(measured.file("samples.json").read_text())
    points = [*measured.spec.bandwidths, *measured.spec.gemms]
    assert len(samples) == len(points)
    of_points = {json.dumps({k: v for k, v in s.items() if k != "rates_per_round"}): s for s in samples}
    for point in points:
        identity = point.model_dump(mode="json", exclude={"gb_per_s", "gflop_per_s", "reason", "fastest"})
        rates = of_points[json.dumps(identity)]["rates_per_round"]
        if point.rate:
            assert min(rates) <= point.rate.value <= max(rates)
        if point.fastest:
            assert point.fastest == max(rates)
        assert len(rates) in (0, 5)


def test_the_first_cache_is_fastest(measured: Artifact[PeaksSpec]) -> None:
    """By the best round of any point, stable or not: this machine may be shared."""
    samples = json.loads(measured.file("samples.json").read_text())
    best: dict[str, float] = {}
    for sample in samples:
        if sample.get("threads") == 1 and "level" in sample and sample["rates_per_round"]:
            best[sample["level"]] = max(best.get(sample["level"], 0.0), *sample["rates_per_round"])
    if "L1" not in best:
        pytest.skip("this machine hides its caches")
    assert len(best) > 1 and best["L1"] == max(best.values())


def test_what_the_figures_hold_for_is_said(measured: Artifact[PeaksSpec]) -> None:
    assert {"cpu", "cpus", "caches", "torch", "onnxruntime", "cuda"} <= set(measured.spec.hardware)


def test_the_metrics_are_the_peaks(measured: Artifact[PeaksSpec]) -> None:
    metrics = measured.manifest.metrics
    for threads in (1, usable_cpus()):
        for name, rate in (
            (f"l1_gb_per_s_{threads}_threads", measured.spec.bandwidth("L1", threads=threads)),
            (f"fp32_gflop_per_s_{threads}_threads", measured.spec.arithmetic("fp32", threads=threads)),
        ):
            assert metrics.get(name) == (rate.value if rate else None)


def test_the_result_is_incomplete_where_a_peak_is_not_stable_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine's rounds agree to a billionth."""
    monkeypatch.setattr(measure, "_MEMORY_SHARE", 1e-3)
    config = PeaksConfig(threads=(1,), gemm_sizes=(64,), rounds=5, time_budget_s=1, max_spread=1e-9)
    spec = peaks.run(config, out=Output(path=tmp_path, scratch=tmp_path, threads=1)).spec
    assert spec.not_stable.startswith("1 thread: ")
    for waited, others, stolen, busy in (
        (0.5, 0.01, 0.0, False),  # threads beyond the CPUs
        (0.0, 0.1, 0.0, True),
        (0.0, 0.0, 0.1, True),
    ):
        seen = Slice(waited=waited, others=others, stolen=stolen, throttled=0.0)
        said = measure._incomplete(spec, Watch(Quiet()), seen)
        assert said == (f"not stable on a busy machine: {spec.not_stable}" if busy else "")


@pytest.mark.parametrize(
    "wrong",
    [{"threads": []}, {"threads": [0]}, {"rounds": 4}, {"gemm_sizes": [30]}, {"max_spread": 0}, {"round": 7}],
)
def test_a_config_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid):
        validate(PeaksConfig, wrong, where="the config")


def test_more_threads_than_cpus_is_refused() -> None:
    assert "CPUs" in PeaksConfig(threads=(1, usable_cpus() + 1)).unsupported_reason()
    assert PeaksConfig(threads=(usable_cpus(),)).unsupported_reason() == ""
