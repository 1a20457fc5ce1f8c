"""Does the benchmark say only what is true? One engine against itself and another, quiet and disturbed.

    .venv/bin/python -m tests.measure_protocol quiet|hog|half|bursts [--runs 20] [--run latest]

Takes the engines fp32/onnx and int8/onnx of a run (make run), times the first twice under two names, and says
how far the accepted ratios are off: of the first to itself from 1, of the second to the first from the median
of a quiet series, which `quiet` prints and the others want as --truth.

hog: two processes that compute for the whole run. half: for its first half. bursts: for 0.3 to 1.5 s at a
time, with pauses of 0.5 to 3 s (seeded).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from components.benchmark.stage import BenchmarkConfig, Quiet
from components.benchmark.statistics import ratio_of_quantiles
from components.benchmark.subjects import EngineSubject
from components.benchmark.timed import Timed, time_subjects
from components.contract import Output
from components.measurements import Interval
from pipelines.run_record import load
from pipelines.store import Store

HOME = Path("runs")
_HOG = "while True: sum(range(100_000))"


def main() -> None:
    """Run the series and print one line a run and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("series", choices=["quiet", "hog", "half", "bursts"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--run", default="latest")
    parser.add_argument("--truth", type=float, help="fp32/onnx over int8/onnx, from the quiet series")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds that a run may take")
    parser.add_argument("--watched", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    subjects = _subjects(given.run)
    same, other, invalid = [], [], 0
    for index in range(given.runs):
        begun_s = time.monotonic()
        with _disturbed(given.series, given.budget, seed=index):
            timed = _time(subjects, given.budget, seed=index, watched=given.watched)
        took = f"{time.monotonic() - begun_s:4.0f} s, {timed.conditions.dropped} slices dropped"
        if timed.invalid:
            invalid += 1
            print(f"{index + 1:2d}  INVALID, {took}: {timed.invalid}", flush=True)
            continue
        itself, to_int8 = _ratio(timed, "a", "b"), _ratio(timed, "a", "int8")
        same.append(itself.value)
        other.append(to_int8.value)
        print(f"{index + 1:2d}  itself {_words(itself)}, int8 {_words(to_int8)}, {took}", flush=True)
    _summarise(same, other, given.truth, invalid)


def _subjects(run: str) -> dict[str, EngineSubject]:
    steps = load(HOME, run).steps
    store = Store(HOME)
    fp32, int8 = (
        EngineSubject(folder=store.open(steps[step].digest).path.resolve())
        for step in ("export-onnx", "export-quantize-onnx")
    )
    return {"a": fp32, "b": fp32, "int8": int8}


def _time(subjects: dict[str, EngineSubject], budget_s: float, *, seed: int, watched: bool) -> Timed:
    config = BenchmarkConfig(
        reference="a",
        batch_sizes=(1,),
        scenarios=(),
        concurrency=(),
        time_budget_s=budget_s,
        seed=seed,
        quiet=Quiet(enforce=watched),
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        x_nchw = np.load(subjects["a"].folder / "golden_x_nchw.npy")
        np.savez(place / "inputs.npz", x_nchw=x_nchw)
        out = Output(path=place, scratch=place, threads=2)
        return time_subjects(config, subjects, place / "inputs.npz", out)


def _ratio(timed: Timed, one: str, other: str) -> Interval:
    at_1 = (timed.latencies[name][1] for name in (one, other))
    return ratio_of_quantiles(*at_1, 0.5, timed.rounds_of_launches)


def _words(ratio: Interval) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


@contextmanager
def _disturbed(series: str, budget_s: float, *, seed: int) -> Iterator[None]:
    """Two processes that compute, in the rhythm of the series."""
    over = threading.Event()
    rng = random.Random(seed)

    def disturb() -> None:
        if series == "hog":
            _compute(over, 1e9)
        elif series == "half":
            _compute(over, budget_s / 2)
        while series == "bursts" and not over.is_set():
            _compute(over, rng.uniform(0.3, 1.5))
            over.wait(min(3.0, 0.5 + rng.expovariate(1)))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _compute(over: threading.Event, seconds: float) -> None:
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(2)]
    over.wait(min(seconds, threading.TIMEOUT_MAX))
    for hog in hogs:
        hog.kill()
        hog.wait()


def _summarise(same: list[float], other: list[float], truth: float | None, invalid: int) -> None:
    truth = truth or (statistics.median(other) if other else 1.0)
    off = [abs(ratio - 1) for ratio in same]
    off_other = [abs(ratio / truth - 1) for ratio in other]
    print(f"accepted {len(same)}, INVALID {invalid}")
    if same:
        within = sum(error <= 0.02 for error in off)
        print(f"itself: {within} of {len(off)} within 2 %, the worst off by {max(off):.1%}")
        print(f"int8: truth {truth:.3f}, the worst off by {max(off_other):.1%}")
        beyond = sum(error > 0.1 for error in off + off_other)
        print(f"ratios off by more than 10 %: {beyond} of {len(off) + len(off_other)}")


if __name__ == "__main__":
    main()
