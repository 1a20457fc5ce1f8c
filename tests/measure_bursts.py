"""What bursts of other processes leave behind in the requests between them: `make measure-bursts`.

    make run && .venv/bin/python -m tests.measure_bursts [--seconds 240] [--settling-ms 5] [--run latest]

Times the engines of a run in one launch, 8 seconds idle and 8 seconds beside two processes that compute in
each rhythm, in turn, so that only the rhythm differs. Prints of each rhythm how many rounds counted, and how
many times faster than the first engine each other one is in these. --settling-ms 0 counts a request as soon
as none of the engine's threads waits for a CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from hpml.core.contract import Output
from hpml.measuring.bench import Bench
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine import watch
from hpml.measuring.paired import MIN_ROUNDS
from hpml.measuring.rounds import Round, round_orders
from hpml.measuring.statistics import median
from hpml.measuring.subjects import EngineSubject
from tests.hogs import hogs
from tests.measure_states import engines_of

_TURN_S = 8.0
_ALWAYS_S = 1e9
RHYTHMS = {  # seconds of a period, and of them those that are busy
    "idle": (1.0, 0.0),
    "half of each second": (1.0, 0.5),
    "half of each 5 ms": (0.005, 0.0025),
    "all the time": (_ALWAYS_S, _ALWAYS_S),
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path("runs"))
    parser.add_argument("--run", default="latest")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--settling-ms", type=float, default=watch.SETTLING_NS / 1e6)
    given = parser.parse_args()
    engines = engines_of(given.home, given.run)
    watch.SETTLING_NS = round(given.settling_ms * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        np.savez(inputs, x_nchw=np.load(next(iter(engines.values())).path / "golden_x_nchw.npy"))
        config = BenchmarkConfig(reference=next(iter(engines)), batch_sizes=(1,))
        subjects = {name: EngineSubject(folder=engine.path.resolve()) for name, engine in engines.items()}
        out = Output(Path(folder), Path(folder), threads=len(os.sched_getaffinity(0)))
        _print_table(list(engines), _measure(Bench(subjects, inputs, config, out), given.seconds))


def _measure(bench: Bench, seconds: float) -> dict[str, list[Round]]:
    orders = round_orders(bench.names, seed=0)
    found: defaultdict[str, list[Round]] = defaultdict(list)
    with bench.launched():
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for name, (period_s, busy_s) in RHYTHMS.items():
                with hogs(2, period_s=period_s, busy_s=busy_s) if busy_s else nullcontext():
                    turn_s = time.monotonic() + _TURN_S
                    while time.monotonic() < turn_s:
                        found[name].append(bench.time_round(next(orders), 1, 0))
    return found


def _print_table(names: list[str], found: dict[str, list[Round]]) -> None:
    first, *others = names
    print(f"| two processes compute | rounds that count | {' | '.join(f'x, {name}' for name in others)} |")
    print("|---|--:|" + "--:|" * len(others))
    for rhythm, rounds in found.items():
        counted = [one.latency_ms for one in rounds if one.latency_ms]
        p50_ms = {name: np.array([np.nanmedian(one[name]) for one in counted]) for name in names}
        cells = []
        for name in others:
            if len(counted) < MIN_ROUNDS:
                cells.append("-")
                continue
            ratio = median(p50_ms[first] / p50_ms[name])
            cells.append(f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")
        print(f"| {rhythm} | {len(counted)} of {len(rounds)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
