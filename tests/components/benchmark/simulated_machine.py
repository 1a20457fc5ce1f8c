"""A machine whose disturbances have a known shape, below the protocol: its clock, its engines, its probe."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpml.core.contract import Output
from hpml.measuring.bench import Bench
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine.run_queue import Reading, Waited
from hpml.measuring.machine.watch import Snapshot, Watch, undisturbed
from hpml.measuring.subjects import Subject
from hpml.measuring.subjects.base import Opened

_LAUNCH_S = 0.5  # of one engine
_PROBE_S = 0.006
_READING_NS = 500_000


@dataclass(frozen=True)
class SimulatedEngine:
    """Its latency at batch 1 in each state; of larger batches, in proportion."""

    near_ms: float
    far_ms: float


@dataclass
class SimulatedMachine:
    """What happens when. hog(t): when the burst of another process that runs at t ends; t if none runs."""

    engines: Mapping[str, SimulatedEngine]
    hog: Callable[[float], float] = lambda at_s: at_s
    share_far: float = 0.65
    dwell_s: float = 3.0  # of a state, on average
    launch_spread: float = 0.01  # of an engine's speed, from launch to launch
    noise: float = 0.03  # of a request
    seed: int = 0
    now_s: float = 1000.0
    _edges_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self._edges_s = [self.now_s]
        self._far_first = bool(self.random.random() < self.share_far)
        self.of_launch = dict.fromkeys(self.engines, 1.0)

    def is_far(self, at_s: float) -> bool:
        """Whether the cores are far apart at a time."""
        while self._edges_s[-1] <= at_s:
            far = self._far_first ^ (len(self._edges_s) % 2 == 0)
            mean_s = 2 * self.dwell_s * (self.share_far if far else 1 - self.share_far)
            self._edges_s.append(self._edges_s[-1] + self.random.exponential(mean_s))
        index = bisect.bisect_right(self._edges_s, at_s)
        return self._far_first ^ (index % 2 == 0)

    def relaunch(self) -> None:
        """New processes."""
        for name in self.engines:
            self.of_launch[name] = float(np.exp(self.random.normal(0, self.launch_spread)))
            self.now_s += _LAUNCH_S

    def probe_ns(self) -> float:
        """The distance of the cores."""
        self.now_s += _PROBE_S
        centre = 480.0 if self.is_far(self.now_s) else 190.0
        return float(centre * np.exp(self.random.normal(0, 0.05)))

    def request(self, name: str, batch: int) -> tuple[float, float, float]:
        """Start, end, and seconds waited of one request, now."""
        engine, begun_s = self.engines[name], self.now_s
        latency_ms = engine.far_ms if self.is_far(begun_s) else engine.near_ms
        needed_s = latency_ms / 1e3 * batch * self.of_launch[name]
        needed_s *= float(np.exp(self.random.normal(0, self.noise)))
        waited_s = 0.0
        while needed_s > 0:
            free_s = self.hog(self.now_s)
            waited_s += free_s - self.now_s
            self.now_s = free_s
            step_s = min(needed_s, 0.0005)
            self.now_s, needed_s = self.now_s + step_s, needed_s - step_s
        return begun_s, self.now_s, waited_s


class _Distance:
    def __init__(self, machine: SimulatedMachine) -> None:
        self.round_trip_ns = machine.probe_ns


class SimulatedSubject(Subject):
    """One that nothing opens."""

    subject: str = "simulated"

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Not called."""
        raise AssertionError


class _WatchOfNothing(Watch):
    """What disturbs the machine that the test runs on is not the simulated one's matter."""

    def snapshot(self, pid: int | None = None) -> Snapshot:
        """Always the same."""
        return Snapshot(at_s=0, waited=Waited(0, 0, 0), ran_s=0, busy_s=0, stolen_s=0, throttled_s=0)


class SimulatedBench(Bench):
    """The protocol on a simulated machine."""

    def __init__(self, machine: SimulatedMachine, config: BenchmarkConfig, scratch: Path) -> None:
        self.machine = machine
        subjects = {name: SimulatedSubject() for name in machine.engines}
        super().__init__(
            subjects, scratch / "inputs.npz", config, Output(scratch / "out", scratch, threads=2)
        )
        self.watch = _WatchOfNothing(config.quiet)

    def now_s(self) -> float:  # type: ignore[override]
        """The machine's clock."""
        return self.machine.now_s

    @contextmanager
    def launched(self) -> Iterator[None]:
        """New processes, in name only."""
        self.machine.relaunch()
        self._distance = _Distance(self.machine)  # type: ignore[assignment]
        for name, engine in self.machine.engines.items():
            for batch in self.config.timed_batches:
                count = max(3 if batch == 1 else 1, int(self.config.slice_ms / engine.near_ms / batch))
                self.requests[name].setdefault(batch, count)
        yield

    def _time_slice(self, name: str, batch: int) -> dict[str, Any]:
        begun_ns = round(self.now_s() * 1e9)
        waited_ns, readings = 0, [_reading(begun_ns, begun_ns, 0)]
        rows: list[tuple[int, int]] = []
        for _ in range(self.requests[name][batch]):
            begun_s, ended_s, waited_s = self.machine.request(name, batch)
            rows.append((round(begun_s * 1e9), round(ended_s * 1e9)))
            waited_ns += round(waited_s * 1e9)
            if rows[-1][1] > readings[-1][0] + _READING_NS:
                readings.append(_reading(begun_ns, rows[-1][1], waited_ns))
        readings.append(_reading(begun_ns, rows[-1][1], waited_ns))
        started_ns, finished_ns = np.array(rows).T
        clean = undisturbed(started_ns, finished_ns, readings, max_waited=self.config.quiet.max_waited)
        return {
            "latency_ms": np.where(clean, (finished_ns - started_ns) / 1e6, np.nan),
            "device_ms": [],
        }


def _reading(begun_ns: int, now_ns: int, waited_ns: int) -> Reading:
    return now_ns, {1: Waited(waited_ns, switches=0, ran_ns=now_ns - begun_ns - waited_ns)}


def bursts(period_s: float, share: float, *, offset_s: float = 0.0) -> Callable[[float], float]:
    """A process that runs for a share of each period."""

    def ends_s(at_s: float) -> float:
        into_s = (at_s + offset_s) % period_s
        return at_s + period_s * share - into_s if into_s < period_s * share else at_s

    return ends_s


def both(hogs: Sequence[Callable[[float], float]]) -> Callable[[float], float]:
    """Several processes."""
    return lambda at_s: max(hog(at_s) for hog in hogs)
