"""The rounds of a benchmark as files: samples.npz, and what is kept from attempt to attempt.

Rounds outlive the attempt that timed them, in `Output.scratch`: a machine that is quiet one minute in ten
gets its figures from several attempts. That folder belongs to one key of the store: to these very engines,
this config, these libraries and this hardware.
"""

from __future__ import annotations

import math
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpml.artifacts.measurements import EngineSettings
from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Config
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.rounds import Round, Rounds, state_of

_DROPPED = "dropped"


def write_samples(path: Path, rounds: Rounds, names: Sequence[str], config: BenchmarkConfig) -> None:
    """The rounds as .npz: what `MeasurementsSpec` says, and what its figures follow from.

    "NAME@BATCH/device" is the time on the GPU. Of the rounds at BATCH, "seconds@BATCH" is how long they took,
    "launch@BATCH" of which launch they are, and "round_trip_ns@BATCH" (rounds, 2) what was probed before and
    after. "seconds@dropped" and so on are those of the rounds at any batch size that do not count.
    """
    first_s = min((one.at_s for one in rounds.all), default=0.0)
    _write(path, rounds, names, config.timed_batches, since_s=first_s)


def _write(
    path: Path, rounds: Rounds, names: Sequence[str], batches: Iterable[int], *, since_s: float
) -> None:
    batches, states = list(batches), rounds.states()
    on_gpu = [name for name in names if any(name in one.device_ms for one in rounds.all)]
    arrays: dict[str, Any] = {}
    for suffix, latencies in (
        ("", rounds.latencies(names, batches)),
        ("/device", rounds.latencies(on_gpu, batches, of="device_ms")),
    ):
        for name, of_batch in latencies.items():
            arrays |= {f"{name}@{batch}{suffix}": ms for batch, ms in of_batch.items()}
    dropped = [one for one in rounds.all if not one.latency_ms]
    for key, of_key in ((_DROPPED, dropped), *((str(batch), rounds.at(batch)) for batch in batches)):
        arrays |= {
            f"at_s@{key}": np.array([one.at_s - since_s for one in of_key]),
            f"seconds@{key}": np.array([one.seconds for one in of_key]),
            f"launch@{key}": np.array([one.launch for one in of_key], np.int64),
            f"round_trip_ns@{key}": np.array([one.round_trip_ns for one in of_key]).reshape(-1, 2),
            f"state@{key}": state_of(of_key, states),
        }
    np.savez(path, allow_pickle=False, **arrays)


def read_samples(path: Path, names: Sequence[str], batches: Sequence[int], launches: Sequence[int]) -> Rounds:
    """The rounds that `write_samples` wrote.

    Those of versions before had every batch size in one round, and no more than how many of them each of
    `launches` had.
    Raises OSError, ValueError or KeyError if they are not there or not whole.
    """
    found: list[Round] = []
    with np.load(path, allow_pickle=False) as arrays:
        for batch in batches:
            latency_ms = {name: arrays[f"{name}@{batch}"] for name in names}
            device_ms = {
                name: arrays[f"{name}@{batch}/device"]
                for name in names
                if f"{name}@{batch}/device" in arrays.files
            }
            count = len(latency_ms[names[0]])
            if f"at_s@{batch}" in arrays.files:
                of_batch = _rounds_of(arrays, str(batch), batch)
            else:
                launch = np.repeat(np.arange(len(launches)), launches) if launches else np.zeros(count, int)
                of_batch = [
                    Round(batch, int(launch[index]), float(index), 0.0, (math.nan, math.nan))
                    for index in range(count)
                ]
            found += [
                replace(
                    one,
                    latency_ms={name: latency_ms[name][index] for name in names},
                    device_ms={name: of_round[index] for name, of_round in device_ms.items()},
                )
                for index, one in enumerate(of_batch)
            ]
        if f"at_s@{_DROPPED}" in arrays.files:
            found += _rounds_of(arrays, _DROPPED, batches[0])
    return Rounds(found)


def _rounds_of(arrays: Mapping[str, Any], key: str, batch: int) -> list[Round]:
    """The rounds of a key, without what was timed in them."""
    columns = [arrays[f"{what}@{key}"] for what in ("launch", "at_s", "seconds", "round_trip_ns")]
    return [
        Round(batch, int(launch), float(at_s), float(seconds), (float(before_ns), float(after_ns)))
        for launch, at_s, seconds, (before_ns, after_ns) in zip(*columns, strict=True)
    ]


# ---------------------------------------------------------------------------------- from attempt to attempt


class RoundPlan(Config):
    """What all rounds have in common. requests: engine -> batch size -> requests in a slice."""

    protocol: Literal[2] = 2  # rounds of another protocol do not count
    settings: dict[str, EngineSettings]
    requests: dict[str, dict[int, int]]


class RoundCheckpoint:
    """The folder where the rounds of unfinished attempts are: a samples.npz of each launch."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder, self._names = folder / "rounds", list(names)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> tuple[RoundPlan | None, Rounds]:
        """What earlier attempts planned and timed.

        None and no rounds if nothing; what is there of another protocol or of other engines is removed.
        """
        plan, rounds = self._read_plan(), Rounds()
        if plan is None:
            for file in self._folder.iterdir():
                file.unlink()
            return None, rounds
        for part in sorted(self._folder.glob("*.npz"), key=lambda file: file.stat().st_mtime_ns):
            rounds.all += self._read_part(part, plan, rounds.launches)
        return plan, rounds

    def add(self, plan: RoundPlan, rounds: Sequence[Round]) -> None:
        """Keep the rounds of one launch, and what they have in common with all others here."""
        if not rounds:
            return
        write_text_atomic(self._folder / "plan.json", plan.model_dump_json())
        part = self._folder / f".{uuid.uuid4().hex}.npz"
        _write(part, Rounds(rounds), self._names, self._batches(plan), since_s=0.0)
        part.rename(part.with_name(part.name[1:]))

    def _read_plan(self) -> RoundPlan | None:
        try:
            plan = RoundPlan.model_validate_json((self._folder / "plan.json").read_bytes())
        except (OSError, ValueError):
            return None
        return plan if set(plan.settings) == set(plan.requests) == set(self._names) else None

    def _read_part(self, file: Path, plan: RoundPlan, launch: int) -> list[Round]:
        """The rounds in one file, as they were timed; none if it is damaged."""
        try:
            found = read_samples(file, self._names, self._batches(plan), ())
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
            return []
        return sorted((replace(one, launch=launch) for one in found.all), key=lambda one: one.at_s)

    def _batches(self, plan: RoundPlan) -> list[int]:
        return list(plan.requests[self._names[0]])
