"""samples.npz: the rounds of a benchmark, as an artifact or a bench folder has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.benchmark.rounds import Round, Rounds, state_of
from components.benchmark.stage import BenchmarkConfig


def write_samples(path: Path, rounds: Rounds, names: Sequence[str], config: BenchmarkConfig) -> None:
    """All rounds as .npz: what `components.measurements.MeasurementsSpec` says, and what they follow from.

    "NAME@BATCH/device" is the time on the GPU. Of the rounds at BATCH, "seconds@BATCH" is how long they took,
    "launch@BATCH" of which launch they are, and "round_trip_ns@BATCH" (rounds, 2) what was probed before and
    after.
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
    for batch in batches:
        of_batch = rounds.at(batch)
        arrays |= {
            f"at_s@{batch}": np.array([one.at_s - first_s for one in of_batch]),
            f"seconds@{batch}": np.array([one.seconds for one in of_batch]),
            f"launch@{batch}": np.array([one.launch for one in of_batch], np.int64),
            f"round_trip_ns@{batch}": np.array([one.round_trip_ns for one in of_batch]).reshape(-1, 2),
            f"state@{batch}": state_of(of_batch, states),
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
                of_rounds = [
                    arrays[f"{what}@{batch}"] for what in ("at_s", "seconds", "launch", "round_trip_ns")
                ]
            else:
                launch = np.repeat(np.arange(len(launches)), launches) if launches else np.zeros(count, int)
                of_rounds = [np.arange(count), np.zeros(count), launch, np.full((count, 2), np.nan)]
            for index, (at_s, seconds, launch_of, round_trip_ns) in enumerate(zip(*of_rounds, strict=True)):
                found.append(
                    Round(
                        batch=batch,
                        launch=int(launch_of),
                        at_s=float(at_s),
                        seconds=float(seconds),
                        round_trip_ns=(float(round_trip_ns[0]), float(round_trip_ns[1])),
                        latency_ms={name: latency_ms[name][index] for name in names},
                    )
                )
    return Rounds(found)
