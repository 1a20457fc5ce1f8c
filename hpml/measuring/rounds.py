"""The rounds that were timed: what each engine took, whether it was disturbed, how far the cores were apart.

They outlive the attempt that timed them, in `Output.scratch`: a machine that is quiet one minute in ten gets
its figures from several attempts. That folder belongs to one key of the store: to these very engines, this
config, these libraries and this hardware.
"""

from __future__ import annotations

import json
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.measurements import EngineSettings
from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import canonical_json
from hpml.measuring.machine.state_clusters import States, find_states

PROTOCOL = 1  # rounds of another protocol do not count
MIXED = -1  # the state of a round in which the cores moved

# engine -> batch size -> milliseconds, float64 (rounds, requests), NaN where a request was disturbed
Latencies = dict[str, dict[int, NDArray[np.float64]]]


@dataclass(frozen=True)
class Round:
    """Every engine once at one batch size.

    launch: of the processes, from 0. at_s: when it began, seconds of the wall clock. round_trip_ns: before
    and after it, NaN where it was not probed. latency_ms, device_ms: engine -> (requests,); the latter
    only of engines on a GPU. Both are empty where something disturbed the round as a whole: it tells no more
    than which state the cores were in.
    """

    batch: int
    launch: int
    at_s: float
    seconds: float
    round_trip_ns: tuple[float, float]
    latency_ms: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    device_ms: dict[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundPlan:
    """What all rounds have in common. requests: engine -> batch size -> requests in a slice."""

    settings: dict[str, EngineSettings]
    requests: dict[str, dict[int, int]]


class Rounds:
    """All rounds in the order in which they were timed."""

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self.all = list(rounds)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def launches(self) -> int:
        """How many launches there were."""
        return 1 + max((one.launch for one in self.all), default=-1)

    def at(self, batch: int) -> list[Round]:
        """The rounds at one batch size that count."""
        return [one for one in self.all if one.batch == batch and one.latency_ms]

    def latencies(self, names: Iterable[str], batches: Iterable[int]) -> Latencies:
        """Milliseconds of all requests."""
        return {
            name: {batch: _stacked(one.latency_ms[name] for one in self.at(batch)) for batch in batches}
            for name in names
        }

    def device_latencies(self, names: Iterable[str], batches: Iterable[int]) -> Latencies:
        """Milliseconds on the GPU, of the engines that ran there on a stream that we know."""
        on_gpu = {name for one in self.all for name in one.device_ms}
        return {
            name: {batch: _stacked(one.device_ms[name] for one in self.at(batch)) for batch in batches}
            for name in names
            if name in on_gpu
        }

    def states(self) -> States | None:
        """The distances of the cores in all rounds, also those that do not count; None if none was probed."""
        probes = np.array([one.round_trip_ns for one in self.all]).ravel()
        probes = probes[np.isfinite(probes)]
        return find_states(probes) if probes.size else None


def state_of(rounds: Sequence[Round], states: States | None) -> NDArray[np.int64]:
    """The index of the state of each round, MIXED where the cores moved; 0 where none was probed."""
    if states is None or not rounds:
        return np.zeros(len(rounds), np.int64)
    probes = np.array([one.round_trip_ns for one in rounds])
    before, after = (states.of(probes[:, side]) for side in (0, 1))
    return np.where(before == after, before, MIXED)


def _stacked(slices: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    rows = list(slices)
    return np.stack(rows) if rows else np.empty((0, 0))


# ---------------------------------------------------------------------------------- from attempt to attempt


class RoundCheckpoint:
    """The folder where the rounds of unfinished attempts are."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder, self._names = folder / "rounds", set(names)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[RoundPlan | None, Rounds]:
        """What earlier attempts planned and timed.

        None and no rounds if nothing; what is there of another protocol or of other engines is removed.
        """
        plan = self._read_plan()
        if plan is None:
            for file in self._folder.iterdir():
                file.unlink()
            return None, Rounds()
        parts = sorted(self._folder.glob("*.npz"), key=lambda file: file.stat().st_mtime_ns)
        found: list[Round] = []
        for part in parts:
            launch = 1 + max((one.launch for one in found), default=-1)
            found += _read_part(part, launch)
        return plan, Rounds(found)

    def add(self, plan: RoundPlan, rounds: Sequence[Round]) -> None:
        """Keep the rounds of one launch, and what they have in common with all others here."""
        if not rounds:
            return
        fields = {
            "protocol": PROTOCOL,
            "settings": {name: item.model_dump() for name, item in plan.settings.items()},
            "requests": plan.requests,
        }
        write_text_atomic(self._folder / "plan.json", canonical_json(fields))
        arrays: dict[str, Any] = {
            "batch": np.array([one.batch for one in rounds]),
            "at_s": np.array([one.at_s for one in rounds]),
            "seconds": np.array([one.seconds for one in rounds]),
            "round_trip_ns": np.array([one.round_trip_ns for one in rounds]),
        }
        for index, one in enumerate(rounds):
            arrays |= {f"{index}/latency/{name}": values for name, values in one.latency_ms.items()}
            arrays |= {f"{index}/device/{name}": values for name, values in one.device_ms.items()}
        part = self._folder / f".{uuid.uuid4().hex}"
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        part.rename(part.with_name(f"{part.name[1:]}.npz"))

    def _read_plan(self) -> RoundPlan | None:
        try:
            fields = json.loads((self._folder / "plan.json").read_text())
            settings = {name: EngineSettings(**item) for name, item in fields["settings"].items()}
            requests = {
                name: {int(batch): int(count) for batch, count in of_name.items()}
                for name, of_name in fields["requests"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        fits = fields["protocol"] == PROTOCOL and set(settings) == set(requests) == self._names
        return RoundPlan(settings, requests) if fits else None


def _read_part(file: Path, launch: int) -> list[Round]:
    """The rounds in one file; none if it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            of_round: list[dict[str, dict[str, NDArray[np.float64]]]] = [
                {"latency": {}, "device": {}} for _ in arrays["batch"]
            ]
            for key in arrays.files:
                index, _, rest = key.partition("/")
                kind, _, name = rest.partition("/")
                if name:
                    of_round[int(index)][kind][name] = arrays[key]
            return [
                Round(
                    batch=int(arrays["batch"][index]),
                    launch=launch,
                    at_s=float(arrays["at_s"][index]),
                    seconds=float(arrays["seconds"][index]),
                    round_trip_ns=tuple(arrays["round_trip_ns"][index].tolist()),
                    latency_ms=found["latency"],
                    device_ms=found["device"],
                )
                for index, found in enumerate(of_round)
            ]
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
        return []


def round_orders(names: list[str], *, seed: int) -> Iterator[list[str]]:
    """The order of `names` in each round, without end: random permutations, the same whenever the seed is."""
    rng = np.random.default_rng(seed)
    while True:
        yield [names[index] for index in rng.permutation(len(names))]
