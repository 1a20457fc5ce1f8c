"""In which order what is timed. In each round every engine is timed once, in a new random order.

So that a disturbance, or the machine's clock, meets all engines alike, and figures of one round can be
compared. One engine works at a time; the processes of the others sleep. The rounds are spread over several
launches of all engines: where a process happens to get its memory decides a few percent of its speed, and
only fresh processes average that out (Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time").
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.benchmark import gpu
from components.benchmark.engine_process import GRACE_S, EngineProcess
from components.benchmark.stage import BenchmarkConfig
from components.benchmark.subjects import Subject
from components.benchmark.validity import disagreements, drifts
from components.benchmark.watch import Slice, Snapshot, Watch
from components.contract import Output
from components.errors import GateFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_ROUNDS = 5
_WARM_UP_S = 0.5  # at most, for each engine and batch size
_MIN_REQUESTS = 3  # in a slice at batch 1, however slow the engine is
_SHARE_OF_BUDGET = 0.5  # of the time budget that the requests of a quiet run may fill
_PROBE_AGAIN_S = 0.01
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # before a disturbed slice is tried again

# engine -> batch size -> milliseconds, float64 (rounds, requests)
Latencies = dict[str, dict[int, "NDArray[np.float64]"]]


Round = dict[str, dict[int, tuple[dict[str, Any], Slice]]]  # engine -> batch size -> what it answered


class Disturbed(GateFailed):
    """The machine was not quiet for long enough inside the time budget."""


@dataclass
class Launches:
    """What the launches of one engine told. One entry a launch, milliseconds. Memory 0: not known."""

    cold_start_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    device_memory_bytes: int | None = None
    harness_us_per_request: float = 0.0
    device: str = "cpu"
    requests: dict[int, int] = field(default_factory=dict)  # batch -> requests in a slice


class Bench:
    """The processes of all engines, and the watch over them. Processes live inside `launched`."""

    def __init__(
        self, subjects: Mapping[str, Subject], inputs: Path, config: BenchmarkConfig, out: Output
    ) -> None:
        self.config, self.names = config, list(subjects)
        self.threads = config.threads or out.threads
        self.watch = Watch(config.quiet)
        self.launches = {name: Launches() for name in subjects}
        self.grant(config.time_budget_s)
        self._subjects, self._inputs, self._scratch = subjects, inputs, out.scratch
        self._processes: dict[str, EngineProcess] = {}

    def grant(self, seconds: float) -> None:
        """From now on there is so much time."""
        self.deadline_s = time.monotonic() + seconds
        self._reply_limit_s = seconds + GRACE_S

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Start a fresh process for every engine, one after the other, and end them on the way out."""
        with ExitStack() as stack:
            for index, (name, subject) in enumerate(self._subjects.items()):
                self._launch(stack, name, subject, self._scratch / f"engine-{index}.log")
            try:
                yield
                for name, process in self._processes.items():
                    launches = self.launches[name]
                    peak = process.ask("memory", "telling its memory")["peak_rss_bytes"]
                    launches.peak_rss_bytes = max(launches.peak_rss_bytes, peak or 0)
                    if launches.device == "cuda":
                        launches.device_memory_bytes = gpu.memory_bytes(process.pid)
            finally:
                self._processes = {}

    def _launch(self, stack: ExitStack, name: str, subject: Subject, log: Path) -> None:
        """A cold start counts only if the machine was quiet meanwhile; the process is kept either way."""
        begun_ns = time.perf_counter_ns()
        process = stack.enter_context(EngineProcess(name, log, reply_limit_s=self._reply_limit_s))
        before = self.watch.snapshot(process.pid)
        loaded = process.ask(
            "load",
            "loading",
            subject=subject.model_dump(mode="json"),
            inputs=str(self._inputs),
            batch_sizes=batch_sizes(self.config),
            threads=self.threads,
        )
        seen = self.watch.between(before, self.watch.snapshot(process.pid))
        launches = self.launches[name]
        launches.harness_us_per_request = max(
            launches.harness_us_per_request, loaded["harness_us_per_request"]
        )
        launches.device = loaded["device"]
        if not (self.config.quiet.enforce and self.watch.disturbances(seen)):
            launches.cold_start_ms.append((loaded["answered_ns"] - begun_ns) / 1e6)
            launches.load_ms.append(loaded["load_ms"])
        self._processes[name] = process
        for batch in batch_sizes(self.config):
            warm = process.ask(
                "warm_up",
                f"warming up at batch {batch}",
                batch=batch,
                requests=self.config.warmup_requests,
                seconds=_WARM_UP_S,
            )
            launches.requests.setdefault(batch, self._requests(batch, warm["latency_ms"] / 1e3))

    def _requests(self, batch: int, latency_s: float) -> int:
        """How many requests an engine that takes `latency_s` gets in a slice at `batch`.

        What the config asks for, fewer where all engines would not get through their rounds in time.
        """
        config = self.config
        wanted = config.requests_per_round if batch == 1 else math.ceil(config.images_per_round / batch)
        slices = config.rounds * len(self.names) * len(batch_sizes(config))
        affordable = int(_SHARE_OF_BUDGET * config.time_budget_s / slices / latency_s)
        return max(1, min(wanted, max(affordable, _MIN_REQUESTS if batch == 1 else 1)))

    def _quiet_snapshot(self, pid: int) -> Snapshot:
        """The counters at the next moment in which the probe is as fast as it should be.

        What slows a CPU from outside comes and goes within tenths of a second; waiting for its end costs less
        than a slice that has to be repeated.
        """
        while True:
            snapshot = self.watch.snapshot(pid)
            waiting_helps = self.config.quiet.enforce and time.monotonic() < self.deadline_s
            if not waiting_helps or self.watch.is_fast(snapshot):
                return snapshot
            time.sleep(_PROBE_AGAIN_S)

    def take(self, name: str, do: str, doing: str, **arguments: Any) -> tuple[dict[str, Any], Slice]:
        """Ask an engine to `do` something that is timed, and again until nothing disturbed it.

        Raises Disturbed when the time budget is over before that.
        """
        pause_s = _FIRST_PAUSE_S
        process = self._processes[name]
        while True:
            before = self._quiet_snapshot(process.pid)
            reply = process.ask(do, doing, **arguments)
            seen = self.watch.between(before, self.watch.snapshot(process.pid))
            self.watch.slices += 1
            causes = self.watch.disturbances(seen)
            if not causes:
                return reply, seen
            self.watch.drop(causes)
            if not self.config.quiet.enforce:
                return reply, seen
            if time.monotonic() + pause_s > self.deadline_s:
                raise Disturbed(f"the machine was disturbed while {name} was timed")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def batch_sizes(config: BenchmarkConfig) -> list[int]:
    """The batch sizes that are timed, ascending; 1 always is, for latency."""
    return sorted({1, *config.batch_sizes})


def time_rounds(bench: Bench, out: Output) -> Timing:
    """Time all engines over all rounds, or over as many as the time budget allows.

    While an engine drifts, the launch that differs most from the others is measured again; while the rounds
    leave a speed-up too far open, there are more of them.
    Raises Disturbed if fewer than 5 rounds were left undisturbed.
    """
    timing = Timing(bench)
    orders = round_orders(bench.names, seed=bench.config.seed)
    wanted = bench.config.rounds
    _fill(timing, bench, orders, wanted, out)
    while timing.objections() and time.monotonic() < bench.deadline_s:
        if timing.drifts():
            timing.drop_odd_launch()
        else:
            wanted += _rounds_a_launch(bench.config)
        _fill(timing, bench, orders, wanted, out)
    return timing


def _rounds_a_launch(config: BenchmarkConfig) -> int:
    return math.ceil(config.rounds / config.launches)


def _fill(timing: Timing, bench: Bench, orders: Iterator[list[str]], wanted: int, out: Output) -> None:
    """Launch and time until `wanted` rounds are complete, or 5 and the time budget over."""
    while timing.complete < wanted and not timing.may_end:
        with bench.launched(), suppress(Disturbed):
            timing.begin_launch()
            for _ in range(min(_rounds_a_launch(bench.config), wanted - timing.complete)):
                if timing.may_end:
                    break
                timing.add_round(next(orders))
                out.progress(timing.complete, wanted, "rounds")
        timing.drop_slow_rounds()
        if timing.complete < MIN_ROUNDS and time.monotonic() > bench.deadline_s:
            raise Disturbed(f"only {timing.complete} rounds were left undisturbed, {MIN_ROUNDS} are needed")


class Timing:
    """The slices of all engines, by launch and round. A round counts when all engines have their slice."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._launches: list[list[Round]] = []

    @property
    def rounds_of_launches(self) -> tuple[int, ...]:
        """How many rounds each launch has, those without any left out."""
        return tuple(len(rounds) for rounds in self._launches if rounds)

    @property
    def complete(self) -> int:
        """How many rounds are complete."""
        return sum(self.rounds_of_launches)

    @property
    def may_end(self) -> bool:
        """Whether the time budget is over and there are rounds enough."""
        return self.complete >= MIN_ROUNDS and time.monotonic() > self._bench.deadline_s

    def begin_launch(self) -> None:
        """The rounds to come are of new processes."""
        self._launches.append([])

    def add_round(self, order: list[str]) -> None:
        """Time each engine once, in this order. A round that is not finished is no round."""
        self._launches[-1].append({name: self._time(name) for name in order})

    def drop_slow_rounds(self) -> None:
        """Drop rounds that only what came after shows to have been disturbed.

        By a probe that was faster than all before it; or because all engines were slower at once than in
        their better rounds, by something that the probe does not feel, such as a neighbour's use of the
        memory.
        """
        if not self._bench.config.quiet.enforce or not self._rounds:
            return
        self._launches = [[one for one in rounds if self._is_quiet(one)] for rounds in self._launches]
        if len(self._bench.names) > 1 and self._rounds:
            usual_ns = {name: self._usual_ns(name) for name in self._bench.names}
            self._launches = [
                [one for one in rounds if not self._is_slow(one, usual_ns)] for rounds in self._launches
            ]

    def _usual_ns(self, name: str) -> float:
        """The p50 of an engine's better rounds: the lower quartile."""
        return float(np.quantile([self._p50(name, [one]) for one in self._rounds], 0.25))

    def _is_slow(self, of_round: Round, usual_ns: Mapping[str, float]) -> bool:
        least = min(self._p50(name, [of_round]) / usual for name, usual in usual_ns.items()) - 1
        if slow := least > self._bench.config.quiet.max_round_slowdown:
            for _ in _slices(of_round):
                self._bench.watch.drop(["all engines were slower at once"])
        return slow

    def drop_odd_launch(self) -> None:
        """Drop the launch in which the p50 of an engine differs most from that of the launches together."""
        launches = [rounds for rounds in self._launches if rounds]

        def oddness(rounds: list[Round]) -> float:
            return max(
                abs(float(np.log(self._p50(name, rounds) / self._p50(name, self._rounds))))
                for name in self._bench.names
            )

        odd = max(launches, key=oddness)
        self._launches = [rounds for rounds in launches if rounds is not odd]

    def drifts(self) -> list[str]:
        """In which engines the p50 changed in the course of the run, in words."""
        limits = self._bench.config.quiet
        return drifts(self.latencies(), limits) if limits.enforce else []

    def objections(self) -> str:
        """Why the rounds together may not be quoted; empty if they may."""
        config = self._bench.config
        if not config.quiet.enforce:
            return ""
        reference = config.reference if config.reference in self._bench.names else self._bench.names[0]
        disagreeing = disagreements(
            self.latencies(), self.rounds_of_launches, config.quiet, reference=reference
        )
        return "; ".join([*self.drifts(), *disagreeing])

    def _p50(self, name: str, rounds: list[Round]) -> float:
        return float(
            np.median([latency_ns for one in rounds for latency_ns in one[name][1][0]["latency_ns"]])
        )

    def _is_quiet(self, of_round: Round) -> bool:
        watch = self._bench.watch
        causes = [watch.disturbances(seen) for _, seen in _slices(of_round)]
        for found in filter(None, causes):
            watch.drop(found)
        return not any(causes)

    @property
    def _rounds(self) -> list[Round]:
        return [one for rounds in self._launches for one in rounds]

    def latencies(self) -> Latencies:
        """Milliseconds of all requests of the complete rounds."""
        return self._collect("latency_ns", 1e-6)

    def device_latencies(self) -> Latencies:
        """Milliseconds on the GPU, of the engines that ran there on a stream that we know."""
        return {name: of_batch for name, of_batch in self._collect("device_ms", 1.0).items() if of_batch}

    def probe_spread(self) -> float | None:
        """How much longer the probe took beside the worst of the slices that count than at its best.

        None where none counts.
        """
        slices = [seen for of_round in self._rounds for _, seen in _slices(of_round)]
        return max((self._bench.watch.slowdown(seen) for seen in slices), default=None)

    def _time(self, name: str) -> dict[int, tuple[dict[str, Any], Slice]]:
        return {
            batch: self._bench.take(
                name, "time", f"being timed at batch {batch}", batch=batch, requests=count
            )
            for batch, count in self._bench.launches[name].requests.items()
        }

    def _collect(self, key: str, scale: float) -> Latencies:
        collected: Latencies = {}
        for name in self._bench.names:
            by_batch = {
                batch: [of_round[name][batch][0][key] for of_round in self._rounds]
                for batch in sorted(self._bench.launches[name].requests)
            }
            collected[name] = {
                batch: np.asarray(replies) * scale for batch, replies in by_batch.items() if all(replies)
            }
        return collected


def _slices(of_round: Round) -> Iterator[tuple[dict[str, Any], Slice]]:
    for of_engine in of_round.values():
        yield from of_engine.values()


def round_orders(names: list[str], *, seed: int) -> Iterator[list[str]]:
    """The order of `names` in each round, without end: random permutations, the same whenever the seed is."""
    rng = np.random.default_rng(seed)
    while True:
        yield [names[index] for index in rng.permutation(len(names))]
