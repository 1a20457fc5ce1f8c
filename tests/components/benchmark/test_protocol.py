"""Rounds of all engines, in processes that sleep between them; what was disturbed is left out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, open_artifact
from hpml.components.__main__ import Job, execute
from hpml.core.contract import Output
from hpml.core.errors import GateFailed, StageFailed
from hpml.core.hardware import usable_cpus
from hpml.measuring.bench import Bench, Unmeasured
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine.watch import WAITED
from hpml.measuring.process.engine_process import EngineProcess
from hpml.measuring.protocol import time_rounds
from hpml.measuring.rounds import round_orders
from hpml.measuring.samples import RoundCheckpoint
from hpml.measuring.subjects import EngineSubject

Engines = dict[str, Artifact[EngineSpec]]
FAST = BenchmarkConfig(
    reference="one",
    rounds=6,
    launches=2,
    slice_ms=2,
    precision=0.9,
    batch_sizes=(1, 4),
    warmup_requests=2,
    scenarios=(),
    concurrency=(),
    threads=1,
)


@pytest.fixture
def out(tmp_path: Path) -> Output:
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    return Output(path=tmp_path / "out", scratch=tmp_path / "scratch", threads=1)


@pytest.fixture
def inputs(inputs_of: Callable[[int], Path]) -> Path:
    return inputs_of(16)


@pytest.fixture
def subjects(digits_engines: Engines) -> dict[str, EngineSubject]:
    return {
        "one": EngineSubject(folder=digits_engines["fp32/onnx"].path),
        "other": EngineSubject(folder=digits_engines["int8/onnx"].path),
    }


class Heedless(Bench):
    """A bench that finds what it is told to find, round by round, and then nothing: tests share a machine.

    Every request is said to take as long, so that the fewest rounds are precise enough.
    """

    causes: Iterator[list[str]] = iter(())

    def _time_slice(self, name: str, batch: int) -> dict[str, object]:
        reply = super()._time_slice(name, batch)
        return {**reply, "latency_ms": np.ones_like(reply["latency_ms"])}

    def _outside(self) -> list[str]:
        return next(self.causes, [])


def bench_of(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output, causes: Iterable[list[str]] = ()
) -> Heedless:
    bench = Heedless(subjects, inputs, FAST, out)
    bench.causes = iter(causes)
    bench.watch.disturbances_outside = lambda _: bench._outside()  # type: ignore[method-assign]
    bench.watch.disturbances = lambda _, **__: []  # type: ignore[method-assign]
    return bench


def test_rounds_are_random_permutations_that_a_seed_repeats() -> None:
    names = ["a", "b", "c", "d"]
    orders = list(islice(round_orders(names, seed=4), 30))
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 10
    assert {order[0] for order in orders} == set(names)
    assert orders == list(islice(round_orders(names, seed=4), 30))
    assert orders != list(islice(round_orders(names, seed=5), 30))


def test_a_run_has_every_engine_in_every_round_from_several_launches(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    bench = bench_of(subjects, inputs, out)
    rounds = time_rounds(bench, out)
    assert rounds.launches >= 2
    for batch in (1, 4):
        assert len(rounds.at(batch)) >= 6
        assert all(set(one.latency_ms) == {"one", "other"} for one in rounds.at(batch))
    assert bench.watch.slices == 2 * len(rounds)
    assert all((ms > 0).all() for one in rounds.all for ms in one.latency_ms.values())
    for launches in bench.launches.values():
        assert len(launches.cold_start_ms) == len(launches.load_ms) == rounds.launches
        assert all(
            cold > load > 0 for cold, load in zip(launches.cold_start_ms, launches.load_ms, strict=True)
        )
        assert launches.peak_rss_bytes > 10_000_000


def test_a_round_that_something_disturbed_as_a_whole_does_not_count(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    bench = bench_of(subjects, inputs, out, [["steal"], [], ["steal", "noise"]])
    rounds = time_rounds(bench, out)
    assert bench.watch.causes == {"steal": 4, "noise": 2}
    assert bench.watch.slices == 2 * len(rounds)
    assert [bool(one.latency_ms) for one in rounds.all[:4]] == [False, True, False, True]
    assert min(len(rounds.at(batch)) for batch in (1, 4)) >= 6


def test_what_is_asked_as_a_whole_is_asked_again_until_nothing_disturbs_it(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    bench = bench_of(subjects, inputs, out)
    causes = iter([["noise"], ["noise"], []])
    with bench.launched():
        bench.watch.disturbances = lambda _, **__: next(causes)  # type: ignore[method-assign]
        bench.run_until_undisturbed("one", "run_for", "being tried", batch=1, seconds=0.001)
        assert (bench.watch.slices, bench.watch.dropped) == (3, 2)
        bench.watch.disturbances = lambda _, **__: ["noise"]  # type: ignore[method-assign]
        bench.grant(0.1)
        with pytest.raises(Unmeasured):
            bench.run_until_undisturbed("one", "run_for", "being tried", batch=1, seconds=0.001)


def test_a_slow_engine_has_three_requests_in_a_slice_and_a_fast_one_what_fits(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    bench = bench_of(subjects, inputs, out)
    with bench.launched():
        assert set(bench.requests) == {"one", "other"}
        for of_batch in bench.requests.values():
            assert sorted(of_batch) == FAST.timed_batches
            assert of_batch[1] >= 3
            assert of_batch[4] >= 1


# ------------------------------------------------------------------------------------ from attempt to attempt


def test_a_second_attempt_adds_to_the_rounds_of_the_first(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    first = time_rounds(bench_of(subjects, inputs, out), out)
    bench = bench_of(subjects, inputs, out)
    bench.config = FAST.model_copy(update={"rounds": len(first.at(1)) + 4, "launches": first.launches + 1})
    both = time_rounds(bench, out)
    assert len(both) > len(first)
    assert [one.at_s for one in both.all[: len(first)]] == [one.at_s for one in first.all]
    assert both.launches > first.launches
    for one, again in zip(first.all, both.all, strict=False):
        assert one.launch == again.launch
        assert all(np.array_equal(one.latency_ms[name], again.latency_ms[name]) for name in subjects)


def test_rounds_of_other_engines_or_damaged_ones_do_not_count(
    subjects: dict[str, EngineSubject], inputs: Path, out: Output
) -> None:
    rounds = time_rounds(bench_of(subjects, inputs, out), out)
    assert len(RoundCheckpoint(out.scratch, subjects).read()[1]) == len(rounds)
    part = next((out.scratch / "rounds").glob("*.npz"))
    part.write_bytes(part.read_bytes()[:100])
    assert 0 < len(RoundCheckpoint(out.scratch, subjects).read()[1]) < len(rounds)
    plan, none = RoundCheckpoint(out.scratch, ["one", "another"]).read()
    assert (plan, len(none)) == (None, 0)
    assert not list((out.scratch / "rounds").iterdir())


# ---------------------------------------------------------------------------------------- real processes


@contextmanager
def hogs() -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * usable_cpus())]
    try:
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _load(process: EngineProcess, subjects: dict[str, EngineSubject], inputs: Path) -> None:
    subject = subjects["one"].model_dump(mode="json")
    process.ask("load", "loading", subject=subject, inputs=str(inputs), batch_sizes=[1], threads=1)


def test_an_engine_is_stopped_but_while_it_has_a_request(
    subjects: dict[str, EngineSubject], inputs: Path, tmp_path: Path
) -> None:
    with EngineProcess("one", tmp_path / "log", sleeps=True) as process:
        _load(process, subjects, inputs)
        assert _state(process.pid) == "T"
        process.send("run_for", "running", batch=1, seconds=0.5)
        deadline_s = time.monotonic() + 5
        while _state(process.pid) not in "RS" and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert _state(process.pid) in "RS"
        process.receive()
        assert _state(process.pid) == "T"


def test_a_stopped_engine_that_is_killed_is_said_to_be(
    subjects: dict[str, EngineSubject], inputs: Path, tmp_path: Path
) -> None:
    with EngineProcess("one", tmp_path / "log", sleeps=True) as process:
        _load(process, subjects, inputs)
        process._process.kill()
        with pytest.raises(StageFailed, match="killed by SIGKILL"):
            process.ask("run_for", "running", batch=1, seconds=0.1)


@pytest.mark.alone
@pytest.mark.parametrize(
    "strict",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # test_incomplete tries what refuses a result
)
def test_a_machine_that_is_never_quiet_gives_no_figure_and_says_why(
    strict: bool, digits_engines: Engines, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    budget = {"reference": "fp32/onnx", "time_budget_s": 2.0, "scenario_budget_s": 1.0, "threads": None}
    config = FAST.model_copy(update={**budget, "require_quiet": strict})
    place = tmp_path / "measured"
    job = Job(
        run="hpml.components.benchmark.stage:run",
        config=config.model_dump(mode="json"),
        inputs={
            "engines": {name: str(digits_engines[name].path) for name in ("fp32/onnx", "int8/onnx")},
            "data": str(digits_data.path),
        },
        out=str(place),
        threads=2,
    )
    with hogs():
        if strict:
            with pytest.raises(GateFailed, match="not measured: latency at batch 1"):
                execute(job)
            return
        execute(job)
    spec = open_artifact(place, kind="measurements").spec
    assert "machine busy (0 of " in spec.incomplete
    assert spec.conditions.causes[WAITED] == spec.conditions.dropped == spec.conditions.slices > 0
    for figures in spec.engines.values():
        assert figures.status == "not measured"
        assert "machine busy" in figures.reason
        assert figures.quality["accuracy_top1"].value > 0.9 and figures.size_bytes > 0
        assert figures.latency_ms_p50 is figures.speedup_vs_reference is None
    assert all(pair.speedup is None and not pair.states for pair in spec.pairs)
