"""Does a run always end with a result, and never a wrong one? The table of docs/measuring.md.

    make run && make measure-noise            or, some of it:
    .venv/bin/python -m tests.measure_noise [MODE ...] [--runs N] [--budget-s S] [--set KEY=VALUE ...]

Runs the quickstart again and again in a copy of the workspace, where all but the benchmark and what follows
it is cached, on an idle machine and beside two processes that compute. Each run measures anew: it has a seed
of its own. The truth of each figure, per state of the cores and for the settings that the engines were run
with, comes from long idle runs of the same engines. Each run leaves a file in --out, and is not repeated
where that is there: stop it and start it again as you like. At the end it prints the table of all files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import MeasurementsSpec, PairedRatio
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.store import Store
from tests.hogs import hogs

HPML = Path(sys.executable).with_name("hpml")
_HOGS = 2
_ALWAYS = 1e9  # a period that does not end
_SAME_STATE = 1.3  # round trips of a cache line that differ by less are of one state
_SEEN_S = 10.0  # a state has to be seen for so long before its ratios are asked for
_WRONG = 0.05
_NOT_PROBED = CoreState(name="", round_trip_ns=Interval(value=1, low=1, high=1), share=1, seconds=1e9)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with. measured: None if its benchmark has no result."""

    exit_code: int
    seconds: float
    bundle: bool
    measured: MeasurementsSpec | None


@dataclass(frozen=True)
class Mode:
    """A way to disturb a run, and what is asked of it."""

    words: str
    runs: int
    asks: Callable[[Outcome], bool]
    least: float = 0.9  # of the runs
    period_s: float = 1.0
    busy_s: float = 0.0
    quiet_minute: bool = False
    settings: tuple[str, ...] = ()


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; all by default")
    parser.add_argument("--runs", type=int, help="of each mode, in place of those of the table")
    parser.add_argument("--budget-s", type=float, help="benchmark.time_budget_s, but of truth and minute")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as hpml run has it")
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument(
        "--home", type=Path, default=Path("runs"), help="a workspace with a run of the recipe"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/noise"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contexts are left: hogs and the run end
    if unknown := set(given.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    home = given.out / "home"
    if not (given.home / "latest").exists():
        parser.error(f"there is no run in {given.home}: make run")
    if not home.exists():
        shutil.copytree(given.home, home, symlinks=True, ignore=shutil.ignore_patterns(given.out.name))
    for name in given.modes or MODES:
        mode = MODES[name]
        for index in range(given.runs or mode.runs):
            file = given.out / f"{name}-{index}.json"
            if not file.exists():
                budget = [f"benchmark.time_budget_s={given.budget_s}"] if given.budget_s else []
                seed = 1000 * list(MODES).index(name) + index
                outcome = _run(given.recipe, home, mode, [*budget, *mode.settings, *given.set], seed)
                file.write_text(json.dumps(outcome))
                print(f"{file.name}: exit {outcome['exit_code']}, {outcome['seconds']:.0f} s", flush=True)
    _print_table({name: _outcomes(given.out, name) for name in MODES})


def _run(recipe: str, home: Path, mode: Mode, settings: Sequence[str], seed: int) -> dict[str, Any]:
    """One run of the recipe beside the hogs of `mode`."""
    command = [str(HPML), "run", recipe, "--set", f"benchmark.seed={seed}"]
    command += [word for setting in settings for word in ("--set", setting)]
    begun_s = time.monotonic()
    quiet_from_s = begun_s + random.Random(seed).uniform(20, 120)
    quiet_s = (quiet_from_s, quiet_from_s + 60) if mode.quiet_minute else (0.0, 0.0)
    with hogs(_HOGS if mode.busy_s else 0, period_s=mode.period_s, busy_s=mode.busy_s, quiet_s=quiet_s):
        answer = subprocess.run(
            command, env={**os.environ, "HPML_HOME": str(home.resolve())}, capture_output=True, text=True
        )
    record = run_record.load(home.resolve())
    digest = next(step.digest for step in record.steps.values() if step.stage == "benchmark")
    measured: MeasurementsSpec | None = Store(home.resolve()).open(digest).spec if digest else None
    return {
        "exit_code": answer.returncode,
        "seconds": time.monotonic() - begun_s,
        "bundle": (home / record.id / "bundle").exists(),
        "said": answer.stderr.splitlines()[-5:],
        "measured": measured and measured.model_dump(mode="json"),
    }


def _outcomes(folder: Path, mode: str) -> list[Outcome]:
    found = []
    for file in sorted(folder.glob(f"{mode}-[0-9]*.json")):
        told = json.loads(file.read_text())
        measured = MeasurementsSpec.model_validate(told["measured"]) if told["measured"] else None
        found.append(Outcome(told["exit_code"], told["seconds"], told["bundle"], measured))
    return found


# ------------------------------------------------------------------------------------------ what is asked


def _states(spec: MeasurementsSpec) -> tuple[CoreState, ...]:
    return spec.states or (_NOT_PROBED,)


def _in_state(pair: PairedRatio, state: CoreState) -> Interval | None:
    """Where there is only one, the mixture is that one."""
    return pair.states.get(state.name) if state.name else pair.speedup


def _ratios(spec: MeasurementsSpec, state: CoreState) -> list[Interval | None]:
    """Those of each two engines in a state, None where it was not printed."""
    return [_in_state(pair, state) for pair in spec.pairs]


def _is_within_1_percent(outcome: Outcome) -> bool:
    if not _has_a_bundle(outcome) or outcome.measured is None:
        return False
    lasting = [state for state in _states(outcome.measured) if state.seconds >= _SEEN_S]
    ratios = [ratio for state in lasting for ratio in _ratios(outcome.measured, state)]
    return bool(ratios) and all(ratio and ratio.high - ratio.low <= 0.02 * ratio.value for ratio in ratios)


def _has_a_state(outcome: Outcome) -> bool:
    if not _has_a_bundle(outcome) or outcome.measured is None:
        return False
    in_states = [_ratios(outcome.measured, state) for state in _states(outcome.measured)]
    of_pairs = list(zip(*in_states, strict=True))
    return bool(of_pairs) and all(map(any, of_pairs))


def _is_full(outcome: Outcome) -> bool:
    return _has_a_state(outcome) and outcome.measured is not None and not outcome.measured.incomplete


def _says_not_measured(outcome: Outcome) -> bool:
    return _has_a_bundle(outcome) and outcome.measured is not None and bool(outcome.measured.incomplete)


def _has_a_bundle(outcome: Outcome) -> bool:
    return outcome.exit_code == 0 and outcome.bundle


_LONG = ("benchmark.time_budget_s=600", "benchmark.precision=0.002")
MODES = {
    "truth": Mode("idle, 10 min: the truth", 3, _has_a_bundle, settings=_LONG),
    "idle": Mode(
        "idle: every ratio, in each state seen for 10 s, to within 1 %", 10, _is_within_1_percent, least=1.0
    ),
    "half-5ms": Mode(
        "hogs half of the time, period 5 ms: every ratio for a state",
        20,
        _has_a_state,
        period_s=0.005,
        busy_s=0.0025,
    ),
    "half-1s": Mode("hogs half of the time, period 1 s: likewise", 20, _has_a_state, busy_s=0.5),
    "burst": Mode("hogs 3 s in 10: likewise", 20, _has_a_state, period_s=10, busy_s=3),
    "always": Mode(
        'hogs all the time: "not measured"',
        20,
        _says_not_measured,
        least=1.0,
        period_s=_ALWAYS,
        busy_s=_ALWAYS,
    ),
    "minute": Mode(
        "hogs but for a minute of 3: full table",
        5,
        _is_full,
        least=1.0,
        period_s=_ALWAYS,
        busy_s=_ALWAYS,
        quiet_minute=True,
        settings=("benchmark.time_budget_s=180",),
    ),
}

# ---------------------------------------------------------------------------------------------- the table

Key = tuple[str, ...]  # what a figure is of: engines with their settings


def _figures(spec: MeasurementsSpec) -> Iterator[tuple[Key, float, Interval]]:
    """Every ratio and p50 at batch 1 in each state: what of, the state's round trip in ns, the figure."""
    named = {name: f"{name} ({figures.settings})" for name, figures in spec.engines.items()}
    for state in _states(spec):
        round_trip_ns = state.round_trip_ns.value
        for pair in spec.pairs:
            ordered = pair if pair.engine < pair.baseline else pair.inverse()
            if ratio := _in_state(ordered, state):
                yield (named[ordered.engine], named[ordered.baseline]), round_trip_ns, ratio
        for name, figures in spec.engines.items():
            of_states = {one.state: one.latency_ms_p50 for one in figures.states}
            if p50 := of_states.get(state.name) if state.name else figures.latency_ms_p50:
                yield (named[name],), round_trip_ns, p50


class Known:
    """The figures of some runs, by what they are of and the state of the cores."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._seen: defaultdict[Key, list[tuple[float, float]]] = defaultdict(list)
        for outcome in outcomes:
            for key, round_trip_ns, figure in _figures(outcome.measured) if outcome.measured else ():
                self._seen[key].append((round_trip_ns, figure.value))

    def values(self, key: Key, round_trip_ns: float) -> list[float]:
        """All of them in that state."""
        return [
            value
            for seen_ns, value in self._seen[key]
            if abs(math.log(seen_ns / round_trip_ns)) < math.log(_SAME_STATE)
        ]

    def largest_spread(self) -> float:
        """By how much the runs differ most, of any ratio in any state: (largest - smallest) / median."""
        groups = [
            self.values(key, seen_ns)
            for key, seen in list(self._seen.items())
            for seen_ns, _ in seen
            if len(key) > 1
        ]
        return max(((max(group) - min(group)) / statistics.median(group) for group in groups), default=0.0)


def _print_table(outcomes: dict[str, list[Outcome]]) -> None:
    truth = Known(outcomes["truth"])
    wrong: defaultdict[str, int] = defaultdict(int)
    held = judged = unknown = 0
    for name, of_mode in outcomes.items():
        for outcome in of_mode if name != "truth" else ():
            for key, round_trip_ns, figure in _figures(outcome.measured) if outcome.measured else ():
                values = truth.values(key, round_trip_ns)
                if not values:
                    unknown += 1
                    continue
                true = statistics.median(values)
                judged += 1
                held += figure.low <= true <= figure.high
                wrong[name] += abs(figure.value / true - 1) > _WRONG
    print("| | limit | found |\n|---|---|---|")
    for name, mode in MODES.items():
        passed = sum(map(mode.asks, outcomes[name]))
        asked = math.ceil(mode.least * mode.runs)
        print(f"| {mode.words} | {asked} of {mode.runs} | {passed} of {len(outcomes[name])} |")
    print(f"| idle: the runs' ratios agree | 2 % | {Known(outcomes['idle']).largest_spread():.1%} |")
    by_mode = ", ".join(f"{count} {name}" for name, count in wrong.items() if count)
    print(f"| figures off by more than 5 % within their state | 0 | {by_mode or 0} of {judged} |")
    share = f"{held / judged:.1%}" if judged else "-"
    print(f"| 95 % intervals that hold the truth | 90 % | {share} of {judged} |")
    if unknown:
        print(f"\n{unknown} figures have no truth: state or settings were not seen in the truth runs.")


if __name__ == "__main__":
    main()
