"""Disturbed slices are dropped and repeated; what cannot be repeated in time is no figure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.__main__ import Job, execute
from components.artifacts import Artifact, DatasetSpec, EngineSpec, read_manifest
from components.benchmark.protocol import Bench, Disturbed, round_orders, time_rounds
from components.benchmark.stage import BenchmarkConfig, Quiet
from components.benchmark.subjects import EngineSubject
from components.benchmark.timed import time_subjects
from components.benchmark.watch import Slice
from components.contract import Output
from components.errors import GateFailed
from components.hardware import usable_cpus
from components.images import load_split, to_x_nchw

Engines = dict[str, Artifact[EngineSpec]]
FAST = BenchmarkConfig(
    reference="one",
    rounds=6,
    launches=2,
    requests_per_round=10,
    batch_sizes=(1, 4),
    images_per_round=8,
    warmup_requests=2,
    scenarios=(),
    concurrency=(),
    # So few requests say little, and nothing here waits for a quiet moment.
    quiet=Quiet(max_slowdown=1e9, max_round_slowdown=1e9, max_drift=1e9, max_disagreement=1e9),
)


@pytest.fixture
def out(tmp_path: Path) -> Output:
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    return Output(path=tmp_path / "out", scratch=tmp_path / "scratch", threads=1)


@pytest.fixture
def inputs(digits_engines: Engines, digits_data: Artifact[DatasetSpec], tmp_path: Path) -> Path:
    images_nhwc, _ = load_split(digits_data, "test")
    x_nchw = to_x_nchw(images_nhwc[:16], digits_engines["fp32/onnx"].spec.input)
    np.savez(tmp_path / "inputs.npz", x_nchw=x_nchw)
    return tmp_path / "inputs.npz"


@pytest.fixture
def subjects(digits_engines: Engines) -> dict[str, EngineSubject]:
    return {
        "one": EngineSubject(folder=digits_engines["fp32/onnx"].path),
        "other": EngineSubject(folder=digits_engines["int8/onnx"].path),
    }


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(subjects: dict[str, EngineSubject], inputs: Path, out: Output) -> MakeBench:
    """A bench whose watch finds what it is told to find, slice by slice, and then nothing."""

    def make(config: BenchmarkConfig, causes: Iterator[list[str]]) -> Bench:
        bench = Bench(subjects, inputs, config, out)
        judged: list[tuple[Slice, list[str]]] = []

        def disturbances(seen: Slice) -> list[str]:
            known = next((found for slice_, found in judged if slice_ is seen), None)
            if known is None:
                known = next(causes, []) if len(judged) >= 2 else []  # the first two are launches
                judged.append((seen, known))
            return known

        bench.watch.disturbances = disturbances  # type: ignore[method-assign]
        return bench

    return make


def test_rounds_are_random_permutations_that_a_seed_repeats() -> None:
    names = ["a", "b", "c", "d"]
    orders = list(islice(round_orders(names, seed=4), 30))
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 10
    assert {order[0] for order in orders} == set(names)
    assert orders == list(islice(round_orders(names, seed=4), 30))
    assert orders != list(islice(round_orders(names, seed=5), 30))


def test_a_quiet_run_has_every_slice_once_from_several_launches(make_bench: MakeBench, out: Output) -> None:
    bench = make_bench(FAST, iter([]))
    timing = time_rounds(bench, out)
    assert timing.complete == 6
    assert timing.rounds_of_launches == (3, 3)
    assert (bench.watch.slices, bench.watch.dropped) == (24, 0)
    for of_batch in timing.latencies().values():
        assert {batch: latency_ms.shape for batch, latency_ms in of_batch.items()} == {1: (6, 10), 4: (6, 2)}
        assert all((latency_ms > 0).all() for latency_ms in of_batch.values())
    for launches in bench.launches.values():
        assert len(launches.cold_start_ms) == len(launches.load_ms) == 2
        assert all(
            cold > load > 0 for cold, load in zip(launches.cold_start_ms, launches.load_ms, strict=True)
        )
        assert launches.peak_rss_bytes > 10_000_000


def test_a_disturbed_slice_is_repeated_until_it_is_not(make_bench: MakeBench, out: Output) -> None:
    bench = make_bench(FAST, iter([["noise"], ["noise", "steal"], [], ["noise"]]))
    timing = time_rounds(bench, out)
    assert timing.complete == 6
    assert (bench.watch.slices, bench.watch.dropped) == (27, 3)
    assert bench.watch.causes == {"noise": 3, "steal": 1}


def test_a_round_that_a_later_probe_shows_to_have_been_slow_is_measured_again(
    make_bench: MakeBench, out: Output
) -> None:
    bench = make_bench(FAST, iter([]))
    found_slow: list[Slice] = []
    quiet = bench.watch.disturbances

    def disturbances(seen: Slice) -> list[str]:
        if bench.watch.slices == 12 and not found_slow:  # judged again at the end of the first launch
            found_slow.append(seen)
        return ["slow"] if any(seen is slow for slow in found_slow) else quiet(seen)

    bench.watch.disturbances = disturbances  # type: ignore[method-assign]
    timing = time_rounds(bench, out)
    assert found_slow
    assert timing.complete == 6
    assert sum(timing.rounds_of_launches) == 6
    assert bench.watch.dropped == 1


def test_without_enforcing_a_disturbed_slice_is_counted_and_kept(make_bench: MakeBench, out: Output) -> None:
    config = FAST.model_copy(update={"quiet": Quiet(enforce=False)})
    bench = make_bench(config, iter([["noise"]]))
    assert time_rounds(bench, out).complete == 6
    assert (bench.watch.slices, bench.watch.dropped) == (24, 1)


def test_where_the_budget_ends_first_there_are_no_rounds(make_bench: MakeBench, out: Output) -> None:
    config = FAST.model_copy(update={"time_budget_s": 0.5})
    bench = make_bench(config, iter([["noise"]] * 10_000))
    with pytest.raises(Disturbed):
        time_rounds(bench, out)


def test_five_complete_rounds_are_enough_when_the_budget_ends(make_bench: MakeBench, out: Output) -> None:
    config = FAST.model_copy(update={"rounds": 500, "launches": 1})

    def causes() -> Iterator[list[str]]:
        yield from [[]] * 22  # five rounds and half of the sixth
        bench.deadline_s = 0.0
        while True:
            yield ["noise"]

    bench = make_bench(config, causes())
    assert time_rounds(bench, out).complete == 5


def test_slow_engines_get_fewer_requests_so_that_all_rounds_fit(make_bench: MakeBench) -> None:
    bench = make_bench(FAST.model_copy(update={"time_budget_s": 60.0}), iter([]))
    assert bench._requests(1, 1e-4) == 10
    assert bench._requests(4, 1e-4) == 2
    assert bench._requests(1, 0.3) == 4
    assert bench._requests(1, 100.0) == 3
    assert bench._requests(4, 100.0) == 1


@pytest.mark.alone
def test_a_machine_that_is_never_quiet_gives_no_figure_and_says_why(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    config = FAST.model_copy(update={"reference": "fp32/onnx", "time_budget_s": 2.0})
    place = tmp_path / "measured"
    job = Job(
        run="components.benchmark.stage:run",
        config=config.model_dump(mode="json"),
        inputs={
            "engines": {name: str(digits_engines[name].path) for name in ("fp32/onnx", "int8/onnx")},
            "data": str(digits_data.path),
        },
        out=str(place),
        threads=2,
    )
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * usable_cpus())]
    try:
        with pytest.raises(GateFailed) as failure:
            execute(job)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    manifest = read_manifest(place)
    assert "INVALID: only 0 rounds were left undisturbed" in manifest.rejected
    assert "other processes" in manifest.rejected
    assert manifest.spec["engines"] == {}
    conditions: Any = manifest.spec["conditions"]
    assert conditions["dropped"] > 0
    assert conditions["causes"]
    assert "INVALID" in str(failure.value)
    assert not manifest.metrics


def test_a_run_that_drifts_is_refused(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.benchmark import protocol

    true_latencies = protocol.Timing.latencies

    def drifting(self: protocol.Timing) -> protocol.Latencies:
        slowed = np.linspace(1, 1.8, self.complete)[:, None]
        steady = true_latencies(self)
        return {
            name: {
                batch: np.median(latency_ms) * slowed * np.ones_like(latency_ms)
                for batch, latency_ms in of_batch.items()
            }
            for name, of_batch in steady.items()
        }

    monkeypatch.setattr(protocol.Timing, "latencies", drifting)
    blind = Quiet(max_waited=1e9, max_stolen=1e9, max_others=1, max_slowdown=1e9, max_round_slowdown=1e9)
    config = FAST.model_copy(update={"rounds": 20, "launches": 1, "quiet": blind, "time_budget_s": 10.0})
    timed = time_subjects(config, subjects, inputs, out)
    assert "changed by +" in timed.invalid
    assert "one" in timed.invalid
