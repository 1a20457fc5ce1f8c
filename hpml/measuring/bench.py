"""The processes of the engines that are measured together, and one round of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpml.artifacts.measurements import EngineSettings
from hpml.core.contract import Output
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine import gpu
from hpml.measuring.machine.core_latency_probe import CoreLatencyProbe
from hpml.measuring.machine.run_queue import RunQueue, Waited
from hpml.measuring.machine.watch import WAITED, Watch, undisturbed
from hpml.measuring.process.engine_process import GRACE_S, EngineProcess
from hpml.measuring.rounds import Round
from hpml.measuring.subjects import Subject

_WARM_UP_S = 0.5  # at most, for each engine and batch size
_LEAST_REQUESTS = 3  # in a slice at batch 1, however slow the engine is, and undisturbed in one that counts
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # before something disturbed is tried again


class Unmeasured(Exception):
    """Why there is no figure: the machine was disturbed, or the time is over."""


@dataclass
class Launches:
    """What the launches of one engine told, as fields of `LaunchRecord`."""

    cold_start_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    device_memory_bytes: int | None = None
    device: str = "cpu"
    energy_mj_per_request: list[float] = field(default_factory=list)
    energy_source: str = ""


class Bench:
    """The processes of all engines, and the watch over them. Processes live inside `launched`.

    settings: with which each engine runs; at first those of its runtime. requests: engine -> batch size ->
    how many a slice has; known after the first launch. harness_us_per_request: what timing itself costs, in
    the process where it cost most.
    """

    def __init__(
        self, subjects: Mapping[str, Subject], inputs: Path, config: BenchmarkConfig, out: Output
    ) -> None:
        self.config, self.names = config, list(subjects)
        self.threads = config.threads or out.threads
        self.settings = {name: subject.candidates(self.threads)[0] for name, subject in subjects.items()}
        self.watch = Watch(config.quiet)
        self.launches = {name: Launches() for name in subjects}
        self.requests: dict[str, dict[int, int]] = {name: {} for name in subjects}
        self.harness_us_per_request = 0.0
        self.grant(config.time_budget_s)
        self.subjects, self.inputs, self._out = subjects, inputs, out
        self._processes: dict[str, EngineProcess] = {}
        self._distance: CoreLatencyProbe | None = None

    def of_trials(self, tried: Mapping[str, tuple[str, EngineSettings]]) -> Bench:
        """A bench at batch 1 of engines under several settings; name -> which engine, and how."""
        subjects = {trial: self.subjects[name] for trial, (name, _) in tried.items()}
        config = self.config.model_copy(update={"batch_sizes": (1,)})
        trials = Bench(subjects, self.inputs, config, self._out)
        trials.settings = {trial: settings for trial, (_, settings) in tried.items()}
        return trials

    @staticmethod
    def now_s() -> float:
        """The time by which budgets are kept."""
        return time.monotonic()

    def grant(self, seconds: float) -> None:
        """From now on there is so much time."""
        self.deadline_s = self.now_s() + seconds
        self._reply_limit_s = seconds + GRACE_S

    @property
    def is_over(self) -> bool:
        """Whether the time budget is."""
        return self.now_s() > self.deadline_s

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Start a fresh process for every engine, one after the other, and end them on the way out."""
        with ExitStack() as stack:
            for index, (name, subject) in enumerate(self.subjects.items()):
                self._launch(stack, name, subject, self._out.scratch / f"engine-{index}.log")
            # With one thread nothing goes from CPU to CPU.
            alone = all(settings.threads == 1 for settings in self.settings.values())
            cpus = [] if alone else sorted(os.sched_getaffinity(0))
            self._distance = stack.enter_context(CoreLatencyProbe(cpus))
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
        """A cold start counts only if nothing disturbed it; the process is kept either way."""
        begun_ns = time.perf_counter_ns()
        started = EngineProcess(name, log, reply_limit_s=self._reply_limit_s, sleeps=True)
        process = stack.enter_context(started)
        before = self.watch.snapshot(process.pid)
        settings, launches = self.settings[name], self.launches[name]
        loaded = process.ask(
            "load",
            "loading",
            subject=subject.of_variant(settings.variant).model_dump(mode="json"),
            inputs=str(self.inputs),
            batch_sizes=self.config.timed_batches,
            threads=settings.threads,
            spinning=settings.spinning,
        )
        seen = self.watch.between(before, self.watch.snapshot(process.pid))
        self.harness_us_per_request = max(self.harness_us_per_request, loaded["harness_us_per_request"])
        launches.device = loaded["device"]
        if not self.watch.disturbances(seen):
            launches.cold_start_ms.append((loaded["answered_ns"] - begun_ns) / 1e6)
            launches.load_ms.append(loaded["load_ms"])
        self._processes[name] = process
        for batch in self.config.timed_batches:
            warm = process.ask(
                "warm_up",
                f"warming up at batch {batch}",
                batch=batch,
                requests=self.config.warmup_requests,
                seconds=_WARM_UP_S,
            )
            least = _LEAST_REQUESTS if batch == 1 else 1
            fitting = math.ceil(self.config.slice_ms / warm["latency_ms"])
            self.requests[name].setdefault(batch, max(least, fitting))

    def time_round(self, order: Sequence[str], batch: int, launch: int) -> Round:
        """Time the engines once each, in this order."""
        assert self._distance
        before_ns, at_s, begun_s = self._distance.round_trip_ns(), time.time(), self.now_s()
        first = self.watch.snapshot()
        replies = {name: self._time_slice(name, batch) for name in order}
        outside = self.watch.between(first, self.watch.snapshot())
        causes = self.watch.disturbances_outside(outside)
        latency_ms = {name: reply["latency_ms"] for name, reply in replies.items()}
        least = _LEAST_REQUESTS if batch == 1 else 1
        if any(np.isfinite(one).sum() < least for one in latency_ms.values()):
            causes.append(WAITED)
        self.watch.count(len(order), causes)
        seconds, after_ns = self.now_s() - begun_s, self._distance.round_trip_ns()
        device_ms = {name: reply["device_ms"] for name, reply in replies.items() if reply["device_ms"]}
        return Round(
            batch=batch,
            launch=launch,
            at_s=at_s,
            seconds=seconds,
            round_trip_ns=(before_ns or math.nan, after_ns or math.nan),
            latency_ms={} if causes else latency_ms,
            device_ms={} if causes else {name: np.asarray(one) for name, one in device_ms.items()},
        )

    def _time_slice(self, name: str, batch: int) -> dict[str, Any]:
        """One engine's requests: `latency_ms`, NaN where one of its threads waited, and `device_ms`."""
        process = self._processes[name]
        reply = process.ask(
            "time", f"being timed at batch {batch}", batch=batch, requests=self.requests[name][batch]
        )
        readings = [
            (at_ns, {int(thread): Waited(*waited) for thread, waited in threads.items()})
            for at_ns, threads in reply["readings"]
        ]
        with RunQueue(process.pid) as queue:  # all threads are stopped now: none waits any longer
            readings.append((time.perf_counter_ns(), queue.read()))
        started_ns, finished_ns = np.asarray(reply["started_ns"]), np.asarray(reply["finished_ns"])
        clean = undisturbed(started_ns, finished_ns, readings, max_waited=self.config.quiet.max_waited)
        latency_ms = np.where(clean, (finished_ns - started_ns) / 1e6, np.nan)
        return {"latency_ms": latency_ms, "device_ms": reply["device_ms"]}

    def run_until_undisturbed(
        self, name: str, do: str, doing: str, *, at_once: int = 1, **arguments: Any
    ) -> dict[str, Any]:
        """Ask an engine to `do` something that is timed as a whole, and again until nothing disturbed it.

        at_once: requests that it has to answer at the same time.
        Raises Unmeasured when the time budget is over before that.
        """
        pause_s = _FIRST_PAUSE_S
        process = self._processes[name]
        while True:
            before = self.watch.snapshot(process.pid)
            reply = process.ask(do, doing, **arguments)
            seen = self.watch.between(before, self.watch.snapshot(process.pid))
            oversubscribed = at_once * self.settings[name].threads > len(os.sched_getaffinity(0))
            causes = self.watch.disturbances(seen, oversubscribed=oversubscribed)
            self.watch.count(1, causes)
            if not causes:
                return reply
            if self.now_s() + pause_s > self.deadline_s:
                raise Unmeasured(f"disturbed: the machine was disturbed while {name} was timed")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
