"""Why do the rounds of a benchmark disagree? Two causes, each seen and each removed: `make measure-states`.

    make run && .venv/bin/python -m tests.measure_states [--threads 1] [--seconds 60] [--run latest]

Times the engines of a run in processes of their own, with the spinning that their runtimes have by default,
in slices in random order, and probes the distance between the cores before and after each round; once with
the waiting processes stopped (SIGSTOP) and once with them left alone. Prints of each engine in how many
slices its threads waited for a CPU, the median of its slices for each distance of the cores, and its
correlation with that.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.measuring.machine.core_latency_probe import CoreLatencyProbe
from hpml.measuring.machine.run_queue import Waited
from hpml.measuring.machine.state_clusters import States, find_states
from hpml.measuring.machine.watch import waited_for_others_ns
from hpml.measuring.process.engine_process import EngineProcess
from hpml.measuring.subjects import EngineSubject
from hpml.pipelines.engine.run_record import load
from hpml.pipelines.engine.store import Store

_SLICE_MS = 25.0
_WAITED = 0.02  # of a slice's time: then its threads had to wait


@dataclass
class Seen:
    """What was seen of one engine, an entry a round."""

    process: EngineProcess
    requests: int
    median_ms: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # by its threads for a CPU, share of the slice

    def time_slice(self) -> None:
        """One slice more."""
        told = self.process.ask("time", "being timed", batch=1, requests=self.requests)
        started_ns, finished_ns = np.array(told["started_ns"]), np.array(told["finished_ns"])
        self.median_ms.append(float(np.median(finished_ns - started_ns)) / 1e6)
        (first_ns, first), *_, (last_ns, last) = told["readings"]
        waited_ns = sum(
            waited_for_others_ns(Waited(*last[thread]).since(Waited(*first[thread]))) for thread in last
        )
        self.waited.append(waited_ns / (last_ns - first_ns))


def main() -> None:
    """Measure both ways and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path("runs"))
    parser.add_argument("--run", default="latest")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of the two tables")
    given = parser.parse_args()
    engines = engines_of(given.home, given.run)
    for stopped in (True, False):
        print(f"\n{given.threads} threads, waiting engines {'stopped' if stopped else 'left alone'}:\n")
        seen, round_trip_ns = _measure(engines, given.threads, given.seconds, stopped=stopped)
        _print_table(seen, round_trip_ns)


def engines_of(home: Path, run: str) -> dict[str, Artifact[EngineSpec]]:
    """The engines that a run built, by the names of its variants and targets."""
    store = Store(home)
    exported = {name: step for name, step in load(home, run).steps.items() if step.stage == "export"}
    engines: dict[str, Artifact[EngineSpec]] = {
        name.removeprefix("export-"): store.open(step.digest)
        for name, step in exported.items()
        if step.digest
    }
    return {name: engine for name, engine in engines.items() if engine.spec.status == "built"}


def _measure(
    engines: dict[str, Artifact[EngineSpec]], threads: int, seconds: float, *, stopped: bool
) -> tuple[dict[str, Seen], Any]:
    """Rounds for so many seconds; of each the slices, and the distance of the cores in ns."""
    seen: dict[str, Seen] = {}
    round_trip_ns = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        for index, (name, engine) in enumerate(engines.items()):
            np.savez(inputs, x_nchw=np.load(engine.path / "golden_x_nchw.npy"))
            log = Path(folder) / f"{index}.log"
            process = stack.enter_context(EngineProcess(name, log, sleeps=stopped))
            subject = EngineSubject(folder=engine.path.resolve()).model_dump(mode="json")
            process.ask(
                "load", "loading", subject=subject, inputs=str(inputs), batch_sizes=[1], threads=threads
            )
            fastest_ms = process.ask("warm_up", "warming up", batch=1, requests=200, seconds=1.0)[
                "latency_ms"
            ]
            seen[name] = Seen(process, max(3, round(_SLICE_MS / fastest_ms)))
        distance = stack.enter_context(CoreLatencyProbe(sorted(os.sched_getaffinity(0))))
        until_s = time.monotonic() + seconds
        before_ns = distance.round_trip_ns() or 1.0
        while time.monotonic() < until_s:
            for one in random.sample(list(seen.values()), len(seen)):
                one.time_slice()
            after_ns = distance.round_trip_ns() or 1.0
            round_trip_ns.append(math.sqrt(before_ns * after_ns))
            before_ns = after_ns
    return seen, np.array(round_trip_ns)


def _print_table(seen: dict[str, Seen], round_trip_ns: Any) -> None:
    states = find_states(round_trip_ns)
    heads = " | ".join(_in_words(states, index) for index in range(len(states.names)))
    print(f"| engine | slices that waited | {heads} | correlation |")
    print("|---|" + "--:|" * (len(states.names) + 2))
    at = states.of(round_trip_ns)
    for name, one in seen.items():
        median_ms = np.array(one.median_ms)
        cells = (f"{np.median(median_ms[at == index]):.3f} ms" for index in range(len(states.names)))
        waited = np.mean(np.array(one.waited) > _WAITED)
        followed = np.corrcoef(np.log(median_ms), np.log(round_trip_ns))[0, 1]
        print(f"| {name} | {waited:.0%} | {' | '.join(cells)} | {followed:.2f} |")


def _in_words(states: States, index: int) -> str:
    """ "near, 212 ns, 35 % of 400 rounds"."""
    every_ns = states.round_trip_ns
    own_ns = every_ns[states.of(every_ns) == index]
    share = len(own_ns) / len(every_ns)
    return (
        f"{states.names[index] or 'all'}, {np.median(own_ns):.0f} ns, {share:.0%} of {len(every_ns)} rounds"
    )


if __name__ == "__main__":
    main()
