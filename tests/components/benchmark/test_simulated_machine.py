"""The whole protocol on a machine whose disturbances and states are known: figures hold, or are not given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpml.artifacts.interval import Interval
from hpml.core.contract import Output
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.paired import Batch1Analysis, missing
from hpml.measuring.protocol import time_rounds
from tests.components.benchmark.simulated_machine import (
    SimulatedBench,
    SimulatedEngine,
    SimulatedMachine,
    bursts,
)

ENGINES = {
    "eager": SimulatedEngine(near_ms=1.17, far_ms=2.02),
    "onnx": SimulatedEngine(near_ms=0.199, far_ms=0.282),
    "int8": SimulatedEngine(near_ms=0.124, far_ms=0.219),
}
CONFIG = BenchmarkConfig(reference="eager", batch_sizes=(1,), time_budget_s=60.0, scenario_budget_s=1.0)
RUNS = 6
QUIET = lambda at_s: at_s  # noqa: E731
HOGS: dict[str, Callable[[float], float]] = {
    "idle": QUIET,
    "half of each second": bursts(1.0, 0.5),
    "a tenth of each 50 ms": bursts(0.05, 0.1),
    "3 s in 10": bursts(10.0, 0.3),
}


def run(machine: SimulatedMachine, scratch: Path, config: BenchmarkConfig = CONFIG) -> SimulatedBench:
    """A bench whose `rounds` are timed."""
    scratch.mkdir(parents=True, exist_ok=True)
    bench = SimulatedBench(machine, config, scratch)
    bench.rounds = time_rounds(bench, Output(scratch / "out", scratch, threads=2))  # type: ignore[attr-defined]
    return bench


def of(bench: SimulatedBench) -> Batch1Analysis:
    """What the rounds at batch 1 tell."""
    return Batch1Analysis.of(bench.rounds, list(ENGINES))  # type: ignore[attr-defined]


def true_ratio(engine: str, state: str) -> float:
    """Against eager."""
    return float(getattr(ENGINES["eager"], f"{state}_ms") / getattr(ENGINES[engine], f"{state}_ms"))


# Slow: the shortest bursts, and none at all, show nearly as much.
QUICK = ("idle", "a tenth of each 50 ms")


@pytest.mark.parametrize(
    "hogs", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOGS]
)
def test_what_is_printed_is_right_and_its_intervals_hold(hogs: str, tmp_path: Path) -> None:
    held, complete = [], 0
    for seed in range(RUNS):
        machine = SimulatedMachine(ENGINES, hog=HOGS[hogs], seed=seed)
        at_1 = of(run(machine, tmp_path / str(seed)))
        assert {state.name for state in at_1.states} <= {"near", "far", ""}
        found: list[tuple[Interval, float]] = []
        for engine in ("onnx", "int8"):
            of_states = at_1.ratio(engine, "eager").states
            found += [(ratio, true_ratio(engine, state)) for state, ratio in of_states.items()]
        complete += set(at_1.ratio("onnx", "eager").states) == {"near", "far"}
        for ratio, truth in found:
            assert abs(ratio.value / truth - 1) < 0.05
            held.append(ratio.low <= truth <= ratio.high)
    assert np.mean(held) >= 0.8, held  # 95 % of so few
    assert complete >= RUNS - 1


@pytest.mark.parametrize(("period_s", "share"), [(0.002, 0.95), (0.005, 0.5)])
def test_a_machine_that_is_never_quiet_gives_no_figure(period_s: float, share: float, tmp_path: Path) -> None:
    bench = run(SimulatedMachine(ENGINES, hog=bursts(period_s, share)), tmp_path)
    assert of(bench).ratio("int8", "eager").speedup is None
    assert "latency at batch 1" in missing(bench.rounds, CONFIG, list(ENGINES))  # type: ignore[attr-defined]
    assert bench.watch.dropped == bench.watch.slices > 0


def test_a_machine_that_is_quiet_for_a_tenth_of_the_time_gets_its_figures_in_the_end(tmp_path: Path) -> None:
    machine = SimulatedMachine(ENGINES, hog=bursts(60.0, 0.9, offset_s=-1000.0), dwell_s=0.5)
    config = CONFIG.model_copy(update={"time_budget_s": 20.0})
    attempts = 0
    while True:
        bench = run(machine, tmp_path, config)
        attempts += 1
        if not missing(bench.rounds, config, list(ENGINES)):  # type: ignore[attr-defined]
            break
        assert attempts < 30
    assert attempts > 1
    at_1 = of(bench)
    assert {state.name for state in at_1.states} == {"near", "far"}
    for state, ratio in at_1.ratio("int8", "eager").states.items():
        assert abs(ratio.value / true_ratio("int8", state) - 1) < 0.05


def test_the_mixture_is_weighted_by_the_time_in_each_state(tmp_path: Path) -> None:
    at_1 = of(run(SimulatedMachine(ENGINES, share_far=0.7), tmp_path))
    ratio = at_1.ratio("int8", "eager")
    shares = {state.name: state.share for state in at_1.states}
    assert ratio.speedup
    expected = np.exp(sum(share * np.log(ratio.states[name].value) for name, share in shares.items()))
    assert ratio.speedup.value == pytest.approx(expected)
    assert ratio.states["far"].value < ratio.speedup.value < ratio.states["near"].value
