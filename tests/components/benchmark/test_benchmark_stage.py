"""The benchmark of real engines of a small network, and its report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.model import ModelSpec
from hpml.components.benchmark.stage import run
from hpml.components.diagnose import stage as diagnose
from hpml.components.peaks import measure as measuring_roofs
from hpml.components.peaks import stage as roofs
from hpml.components.report import stage as report
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.core.hardware import usable_cpus
from hpml.measuring.config import BenchmarkConfig, Quiet
from hpml.measuring.figures import timings
from hpml.measuring.goals import Goals
from hpml.measuring.samples import read_samples
from hpml.measuring.statistics import samples_needed

Engines = dict[str, Artifact[EngineSpec]]
FAST = BenchmarkConfig(
    rounds=5,
    launches=2,
    slice_ms=2,
    precision=0.9,
    batch_sizes=(8, 2),
    warmup_requests=2,
    scenarios=(),
    concurrency=(),
    quiet=Quiet(max_waited=1e6, max_stolen=1e6),  # what is tested here is not how quiet the machine is
)


@pytest.fixture
def engines(digits_engines: Engines, tmp_path: Path) -> Engines:
    """The real engines, and one that this machine could not build."""
    spec = digits_engines["fp32/onnx"].spec.model_copy(
        update={"status": "not built", "reason": "there is no GPU", "target": {"target": "tensorrt"}}
    )
    place = tmp_path / "not-built"
    place.mkdir()
    seal_artifact(place, spec=spec, metrics={}, lineage=digits_engines["fp32/onnx"].manifest.lineage)
    return {**digits_engines, "fp32/tensorrt": open_artifact(place, kind="engine")}


def test_every_engine_is_measured_or_carried_with_its_reason(
    engines: Engines,
    small_model: Artifact[ModelSpec],
    digits_data: Artifact[DatasetSpec],
    run_stage: Callable[..., Artifact[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = run_stage(run, FAST, engines=engines, data=digits_data)
    spec = measured.spec
    assert (spec.threads, spec.best_fp32) == (1, "fp32/onnx")
    assert spec.rounds >= 5
    assert (spec.engines["fp32/tensorrt"].status, spec.engines["fp32/tensorrt"].reason) == (
        "not built",
        "there is no GPU",
    )
    with np.load(measured.file("samples.npz"), allow_pickle=False) as samples:
        for name in ("fp32/eager", "fp32/onnx", "int8/onnx"):
            _check_engine(spec, name, engines[name].spec, samples)
        assert sum("/" in name for name in samples.files) == 9
    _check_samples_give_figures(spec, measured.file("samples.npz"))
    reference = spec.engines["fp32/eager"]
    assert (reference.speedup_vs_reference.low, reference.speedup_vs_reference.high) == (1, 1)
    assert 0 < spec.harness_us_per_request < 50
    assert spec.environment["cpu"]
    assert "latency_ms_p50/int8/onnx" in measured.manifest.metrics

    monkeypatch.setattr(measuring_roofs, "_MEMORY_SHARE", 1e-2)  # of the memory: its DRAM is tested elsewhere
    peaks = run_stage(roofs.run, roofs.PeaksConfig(threads=(1,), gemm_sizes=(64,), rounds=5, time_budget_s=1))
    why = run_stage(
        diagnose.run,
        diagnose.DiagnoseConfig(requests=10),
        engines=engines,
        measured=measured,
        peaks=peaks,
        data=digits_data,
    )
    assert {name: one.status for name, one in why.spec.engines.items()} == {
        name: "diagnosed" if engine.spec.status == "built" else "not diagnosed"
        for name, engine in engines.items()
    }
    written = run_stage(
        report.run,
        Goals(),
        measured=measured,
        engines=engines,
        models={"base": small_model},
        data=digits_data,
        peaks=peaks,
        diagnosis=why,
    )
    assert 0 < written.file("report.html").stat().st_size <= 256 * 1024


def _check_engine(spec: Any, name: str, engine: EngineSpec, samples: Any) -> None:
    figures = spec.engines[name]
    latency_ms = samples[f"{name}@1"]
    assert latency_ms.dtype == np.float64
    rounds = {batch: len(samples[f"{name}@{batch}"]) for batch in (1, 2, 8)}
    assert min(rounds.values()) >= FAST.rounds and rounds[1] == spec.rounds
    assert figures.samples == latency_ms.size == np.isfinite(latency_ms).sum()
    for figure, level in (("latency_ms_p50", 0.5), ("latency_ms_p90", 0.9), ("latency_ms_p99", 0.99)):
        found = getattr(figures, figure)
        if found is None:
            needed = samples_needed(level)
            assert figures.unquoted[figure] == f"{latency_ms.size} of {needed} samples"
            assert latency_ms.size < needed
        else:
            assert found.low <= found.value <= found.high
            assert found.value == np.quantile(latency_ms, level, method="inverted_cdf")
    assert figures.latency_ms_p50
    assert [item.batch for item in figures.throughput] == [2, 8]
    at_8 = figures.throughput[1].rows_per_s
    assert at_8.value == pytest.approx(8e3 / samples[f"{name}@8"].mean())
    if len(spec.states) == 1:  # otherwise it is of the mixture
        medians = {
            other: np.median(samples[f"{other}@1"], axis=1)
            for other in (name, spec.reference, spec.best_fp32)
        }
        for baseline, figure in (
            (spec.reference, "speedup_vs_reference"),
            (spec.best_fp32, "speedup_vs_best_fp32"),
        ):
            speedup = getattr(figures, figure)
            if speedup is None:  # rounds that other tests disturbed may disagree too much
                assert figures.unquoted[figure]
                continue
            ratios = medians[baseline] / medians[name]
            assert speedup.value == pytest.approx(np.quantile(ratios, 0.5, method="inverted_cdf"))
    [(metric, accuracy)] = figures.quality.items()
    assert metric == "accuracy_top1" and accuracy.value == engine.quality[metric]
    assert accuracy.low < engine.quality[metric] < accuracy.high
    assert (figures.size_bytes, figures.macs, figures.methods) == (
        engine.size_bytes,
        engine.macs,
        engine.methods,
    )


def _check_samples_give_figures(spec: MeasurementsSpec, samples: Path) -> None:
    """Whoever has the artifact can compute its figures again, with their intervals."""
    names = ["fp32/eager", "fp32/onnx", "int8/onnx"]
    rounds = read_samples(samples, names, (1, 2, 8), ())
    again = timings(rounds, FAST, names, fastest_fp32=spec.best_fp32, busy="")
    for name in names:
        assert spec.engines[name] == spec.engines[name].model_copy(update=again[name])


@pytest.mark.slow  # a second benchmark; test_figures says which one is best
def test_without_another_fp32_engine_there_is_no_best_one(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec], run_stage: Callable[..., Artifact[Any]]
) -> None:
    engines = {name: digits_engines[name] for name in ("fp32/eager", "int8/onnx")}
    config = FAST.model_copy(update={"batch_sizes": (), "slice_ms": 10})
    spec = run_stage(run, config, engines=engines, data=digits_data).spec
    assert spec.best_fp32 == ""
    assert spec.engines["int8/onnx"].speedup_vs_best_fp32 is None
    assert spec.engines["int8/onnx"].throughput == ()
    assert spec.rounds >= 5
    assert spec.engines["int8/onnx"].latency_ms_p99 is not None  # 700 samples


@pytest.mark.slow  # a third; test_engine_process kills its process, too
def test_a_crash_in_the_middle_fails_the_stage_and_leaves_no_process(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec], run_stage: Callable[..., Artifact[Any]]
) -> None:
    killed: list[int] = []

    def kill_one() -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            workers = _workers()
            if len(workers) == 3 and all(_has_loaded(pid) for pid in workers):
                os.kill(workers[1], 11)
                killed.append(workers[1])
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_one)
    killer.start()
    endless = FAST.model_copy(update={"rounds": 10_000, "time_budget_s": 300.0})
    with pytest.raises(StageFailed, match=r"engine '(fp32|int8)/\w+[^']*' failed while .*killed by SIGSEGV"):
        run_stage(run, endless, engines=digits_engines, data=digits_data)
    killer.join()
    assert killed
    assert not _workers()


def _workers() -> list[int]:
    """The engine processes that this process started, in order."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sorted(
        int(pid)
        for pid in children
        if b"measuring.process.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def _has_loaded(pid: int) -> bool:
    """Whether the process has mapped a runtime."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "onnxruntime" in maps or "libtorch" in maps


def test_an_unknown_reference_is_refused(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec], run_stage: Callable[..., Artifact[Any]]
) -> None:
    config = FAST.model_copy(update={"reference": "fp32/eagre"})
    with pytest.raises(ConfigInvalid, match=r"'fp32/eagre'.*fp32/eager, fp32/onnx, int8/onnx"):
        run_stage(run, config, engines=digits_engines, data=digits_data)


def test_a_reference_that_was_not_built_is_refused(
    engines: Engines, digits_data: Artifact[DatasetSpec], run_stage: Callable[..., Artifact[Any]]
) -> None:
    config = FAST.model_copy(update={"reference": "fp32/tensorrt"})
    with pytest.raises(StageFailed, match="'fp32/tensorrt' was not built: there is no GPU"):
        run_stage(run, config, engines=engines, data=digits_data)


def test_more_threads_than_cpus_are_refused_before_anything_starts() -> None:
    too_many = usable_cpus() + 1
    assert f"threads is {too_many}" in BenchmarkConfig(threads=too_many).unsupported_reason()
    assert BenchmarkConfig(threads=1).unsupported_reason() == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 4), ("batch_sizes", [0]), ("slice_ms", 0), ("threads", 0), ("time_budget_s", 0)],
)
def test_a_config_out_of_bounds_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigInvalid, match=field):
        validate(BenchmarkConfig, {field: value}, where="the benchmark")
