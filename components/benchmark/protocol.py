"""In which order what is timed. In each round every engine is timed once, in a new random order.

So that a disturbance, or the machine's clock, meets all engines alike, and figures of one round can be
compared. One engine works at a time; the processes of the others sleep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from components.benchmark.stage import BenchmarkConfig
from components.contract import Output

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from components.benchmark.engine_process import EngineProcess

MIN_ROUNDS = 5

# engine -> batch size -> milliseconds, float64 (rounds, requests)
Latencies = dict[str, dict[int, "NDArray[np.float64]"]]


def batch_sizes(config: BenchmarkConfig) -> list[int]:
    """The batch sizes that are timed, ascending; 1 always is, for latency."""
    return sorted({1, *config.batch_sizes})


def requests_in_a_round(config: BenchmarkConfig, batch: int) -> int:
    """How many requests of one engine are timed at `batch` in a round."""
    return config.requests_per_round if batch == 1 else math.ceil(config.images_per_round / batch)


def warm_up(engines: Mapping[str, EngineProcess], config: BenchmarkConfig) -> None:
    """Run each engine at each batch size, untimed, one engine after the other."""
    for engine in engines.values():
        for batch in batch_sizes(config):
            engine.ask("time", f"warming up at batch {batch}", batch=batch, requests=config.warmup_requests)


def time_rounds(engines: Mapping[str, EngineProcess], config: BenchmarkConfig, out: Output) -> Latencies:
    """Time all engines over all rounds, or over as many as the time budget allows, 5 at least."""
    timed: dict[str, dict[int, list[list[int]]]] = {
        name: {batch: [] for batch in batch_sizes(config)} for name in engines
    }
    orders = round_orders(list(engines), config.rounds, seed=config.seed)
    deadline_s = time.monotonic() + config.time_budget_s
    for index, order in enumerate(orders):
        if index >= MIN_ROUNDS and time.monotonic() > deadline_s:
            break
        for name in order:
            for batch in batch_sizes(config):
                timed[name][batch].append(_time_slice(engines[name], batch, config))
        out.progress(index + 1, config.rounds, "rounds")
    return {
        name: {batch: np.asarray(latency_ns) / 1e6 for batch, latency_ns in of_batch.items()}
        for name, of_batch in timed.items()
    }


def round_orders(names: list[str], rounds: int, *, seed: int) -> Iterator[list[str]]:
    """The order of `names` in each round: a random permutation, the same whenever the seed is."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        yield [names[index] for index in rng.permutation(len(names))]


def _time_slice(engine: EngineProcess, batch: int, config: BenchmarkConfig) -> list[int]:
    """One engine's requests of one round at one batch size, in nanoseconds."""
    requests = requests_in_a_round(config, batch)
    reply = engine.ask("time", f"being timed at batch {batch}", batch=batch, requests=requests)
    latency_ns: list[int] = reply["latency_ns"]
    return latency_ns
