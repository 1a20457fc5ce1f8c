"""The judge of `make measure-noise`, on outcomes whose verdict is known, and its hogs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    EngineFigures,
    EngineSettings,
    MeasurementsSpec,
    PairedRatio,
    StateFigures,
)
from tests.measure_noise import MODES, Known, Outcome, _print_table

ROOT = Path(__file__).resolve().parents[1]
ROUND_TRIPS_NS = {"near": 200.0, "far": 480.0}


def around(value: float, by: float = 0.005) -> Interval:
    return Interval(value=value, low=value * (1 - by), high=value * (1 + by))


def spec(
    near: float | None, far: float | None, *, threads: int = 2, by: float = 0.005, seconds: float = 30.0
) -> MeasurementsSpec:
    """Of two engines with these ratios in the two states; None: not measured."""
    ratios = {"near": near, "far": far}
    known = {name: around(ratio, by) for name, ratio in ratios.items() if ratio}
    states = tuple(
        CoreState(name=name, round_trip_ns=around(ns), share=0.5, seconds=seconds)
        for name, ns in ROUND_TRIPS_NS.items()
    )

    def figures(ms: float) -> EngineFigures:
        return EngineFigures(
            status="measured" if known else "not measured",
            target="onnx",
            precision="fp32",
            methods=(),
            size_bytes=1,
            parameters=1,
            macs=1,
            settings=EngineSettings(threads=threads),
            states=tuple(StateFigures(state=name, rounds=9, latency_ms_p50=around(ms)) for name in known),
        )

    return MeasurementsSpec(
        reference="a",
        best_fp32="",
        engines={"a": figures(1.0), "b": figures(0.5)},
        pairs=(PairedRatio(engine="b", baseline="a", rounds=9, states=known),),
        states=states,
        rounds=9,
        threads=2,
        seed=0,
        environment={},
        incomplete="" if len(known) == 2 else "not measured: latency at batch 1",
    )


def outcome(measured: MeasurementsSpec | None, exit_code: int = 0, *, bundle: bool = True) -> Outcome:
    return Outcome(exit_code, 1.0, bundle, measured)


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (outcome(spec(2.0, 1.5)), {"idle", "half-5ms", "minute"}),
        (outcome(spec(2.0, 1.5, by=0.02)), {"half-5ms", "minute"}),
        (outcome(spec(2.0, None)), {"half-5ms", "always"}),
        (outcome(spec(None, None)), {"always"}),
        (outcome(spec(2.0, 1.5, seconds=5)), {"half-5ms", "minute"}),
        (outcome(spec(2.0, 1.5), exit_code=5), set()),
        (outcome(spec(2.0, 1.5), bundle=False), set()),
        (outcome(None), set()),
    ],
)
def test_what_is_asked_of_each_mode(found: Outcome, passes: set[str]) -> None:
    assert {name for name in ("idle", "half-5ms", "always", "minute") if MODES[name].asks(found)} == passes


def test_figures_are_held_against_the_truth_of_their_state_and_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    truth = [outcome(spec(2.0, 1.5))] * 3
    runs = [spec(2.01, 1.5), spec(2.0, 1.6), spec(2.0, 1.5, threads=1)]  # right, wrong far, never seen so
    outcomes: dict[str, Any] = {name: [] for name in MODES}
    _print_table({**outcomes, "truth": truth, "burst": [outcome(run) for run in runs]})
    printed = capsys.readouterr().out
    assert "| figures off by more than 5 % within their state | 0 | 1 burst of 12 |" in printed
    assert "| 95 % intervals that hold the truth | 90 % | 91.7% of 12 |" in printed
    assert "\n6 figures have no truth" in printed
    assert "| hogs 3 s in 10: likewise | 18 of 20 | 3 of 3 |" in printed


def test_by_how_much_runs_differ_is_within_a_state() -> None:
    assert Known([outcome(spec(2.0, 1.5)), outcome(spec(2.02, 1.5))]).largest_spread() == pytest.approx(
        0.00995, abs=1e-4
    )


def test_a_run_of_one_state_has_the_truth_of_that_state() -> None:
    one = spec(2.0, 1.5)
    ratio = one.pairs[0].model_copy(update={"states": {}, "speedup": around(1.5)})
    far = one.states[1].model_copy(update={"name": "", "share": 1.0})
    engines = {
        name: figures.model_copy(update={"states": (), "latency_ms_p50": around(1.0)})
        for name, figures in one.engines.items()
    }
    found = outcome(one.model_copy(update={"pairs": (ratio,), "states": (far,), "engines": engines}))
    assert MODES["idle"].asks(found)
    known = Known([outcome(one)])
    assert known.values(("a (2 threads)", "b (2 threads)"), far.round_trip_ns.value) == [
        pytest.approx(1 / 1.5)
    ]


def test_hogs_end_with_whoever_started_them() -> None:
    with_hogs = "with hogs(2, period_s=1, busy_s=0): print(1, flush=True); time.sleep(99)"
    code = f"import time; from tests.hogs import hogs\n{with_hogs}"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as starter:
        assert starter.stdout and starter.stdout.readline()
        started = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        assert len(started) == 2
        _wait_for(lambda: all(b"hogs" in Path(f"/proc/{hog}/cmdline").read_bytes() for hog in started))
        starter.send_signal(signal.SIGKILL)
    _wait_for(lambda: not any(_runs(int(hog)) for hog in started))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _wait_for(condition: Any) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)
