"""samples.npz: the rounds of a benchmark, as an artifact or a bench folder has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.rounds import Round, Rounds, state_of

_DROPPED = "dropped"


def write_samples(path: Path, rounds: Rounds, names: Sequence[str], config: BenchmarkConfig) -> None:
    """The rounds as .npz: what `MeasurementsSpec` says, and what its figures follow from.

    "NAME@BATCH/device" is the time on the GPU. Of the rounds at BATCH, "seconds@BATCH" is how long they took,
    "launch@BATCH" of which launch they are, and "round_trip_ns@BATCH" (rounds, 2) what was probed before and
    after. "seconds@dropped" and so on are those of the rounds at any batch size that do not count.
    """
    batches, states = sorted({1, *config.batch_sizes}), rounds.states()
    arrays: dict[str, Any] = {
        f"{name}@{batch}{suffix}": latency_ms
        for suffix, latencies in (
            ("", rounds.latencies(names, batches)),
            ("/device", rounds.device_latencies(names, batches)),
        )
        for name, of_batch in latencies.items()
        for batch, latency_ms in of_batch.items()
    }
    first_s = min((one.at_s for one in rounds.all), default=0.0)
    dropped = [one for one in rounds.all if not one.latency_ms]
    for key, of_key in ((_DROPPED, dropped), *((str(batch), rounds.at(batch)) for batch in batches)):
        arrays |= {
            f"at_s@{key}": np.array([one.at_s - first_s for one in of_key]),
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
                replace(one, latency_ms={name: latency_ms[name][index] for name in names})
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
