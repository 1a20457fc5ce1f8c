"""What a scenario is, and what all share: trials of how long a request takes, and interleaved rounds."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hpml.artifacts.measurements import ConcurrencyFigures, ScenarioFigures, ScenarioName
from hpml.measuring.bench import Bench, Unmeasured
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.rounds import round_orders

ROUNDS = 7  # from fewer the intervals are much wider: Student's t has two degrees of freedom less than rounds
_TRIAL_REQUESTS, _TRIAL_S = 6, 0.1  # a trial ends with whichever comes first


Figures = TypeVar("Figures", ScenarioFigures, ConcurrencyFigures)


class WorkerRequest(NamedTuple):
    """What a worker is asked: one of its methods with arguments. at_once: requests at the same time."""

    do: str
    arguments: dict[str, Any]
    at_once: int = 1


@dataclass(frozen=True)
class Session:
    """What a scenario is run with.

    latency_ms: of each engine and batch size, roughly: by it, the queries of a slow engine are bounded.
    """

    bench: Bench
    latency_ms: Mapping[str, Mapping[int, float]]

    def affordable(self, latency_ms: float) -> int:
        """How many queries that take so long each fit into the time."""
        return int(1e3 * self.bench.config.scenario_seconds / latency_ms)

    def not_enough(self, queries: int, needed: int) -> str:
        """Why a percentile cannot be quoted of an engine that is too slow."""
        return f"not enough samples: {queries} of {needed} in {self.bench.config.scenario_seconds:g} s"


class Load(ABC, Generic[Figures]):
    """One way in which requests come, and what is measured then."""

    @abstractmethod
    def measure(self, session: Session) -> dict[str, Figures]:
        """The figures of every engine.

        Raises Unmeasured if the machine or the time does not allow any.
        """

    @abstractmethod
    def unmeasured(self, config: BenchmarkConfig, reason: str) -> Figures:
        """Figures without a value, and why."""


class Scenario(Load[ScenarioFigures]):
    """A scenario of MLPerf."""

    name: ScenarioName
    metric: str
    samples_per_query: int = 1

    def unmeasured(self, config: BenchmarkConfig, reason: str = "") -> ScenarioFigures:
        """Figures without a value, and why."""
        return ScenarioFigures(
            scenario=self.name,
            metric=self.metric,
            samples_per_query=self.samples_per_query,
            reason=reason,
        )


def ask(bench: Bench, name: str, asked: WorkerRequest, doing: str) -> dict[str, Any]:
    """What an engine answers when nothing disturbs it.

    Raises Unmeasured when the time budget is over.
    """
    if bench.is_over:
        raise Unmeasured("the time budget was over")
    return bench.run_until_undisturbed(name, asked.do, doing, at_once=asked.at_once, **asked.arguments)


def in_rounds(
    bench: Bench, asked: Mapping[str, WorkerRequest], doing: str
) -> dict[str, list[dict[str, Any]]]:
    """What each engine answers in each of ROUNDS rounds; in a round they take turns in a random order.

    Raises Unmeasured when the time budget is over before the last round.
    """
    replies: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    for order in itertools.islice(round_orders(list(asked), seed=bench.config.seed), ROUNDS):
        for name in order:
            replies[name].append(ask(bench, name, asked[name], doing))
    return replies


def trials(bench: Bench, batch_sizes: list[int]) -> dict[str, dict[int, float]]:
    """About how many milliseconds a request takes, of each engine and batch size; it warms them up, too.

    Raises Unmeasured when the time budget is over.
    """
    return {name: {batch: _trial_ms(bench, name, batch) for batch in batch_sizes} for name in bench.names}


def _trial_ms(bench: Bench, name: str, batch: int) -> float:
    asked = WorkerRequest("warm_up", {"batch": batch, "requests": _TRIAL_REQUESTS, "seconds": _TRIAL_S})
    return float(ask(bench, name, asked, f"being tried at batch {batch}")["latency_ms"])
