"""Who issues the queries: our own loop, or MLPerf's loadgen. Both answer alike, and figures are made alike.

A reply has `latency_ns`, one entry a query, and `seconds` from the first issue to the last answer.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hpml.artifacts.measurements import ScenarioName
from hpml.core.errors import ConfigInvalid


@dataclass(frozen=True)
class WorkerRequest:
    """What a worker is asked: one of its methods with arguments. at_once: requests at the same time."""

    do: str
    arguments: dict[str, Any]
    at_once: int = 1


class Backend(Protocol):
    """Makes requests to a worker."""

    name: Literal["ours", "loadgen"]

    def one_by_one(self, scenario: ScenarioName, *, samples_per_query: int, queries: int) -> WorkerRequest:
        """Queries, each issued when the last is answered."""
        ...

    def all_at_once(self, *, batch: int, batches: int) -> WorkerRequest:
        """One query of all samples, answered `batch` at a time."""
        ...

    def by_arrival(
        self, *, queries_per_s: float, queries: int, bound_ms: float, allowed: int, seed: int
    ) -> WorkerRequest:
        """Queries of one sample that arrive at random times (a Poisson process), answered in order.

        latency_ns counts from the scheduled arrival. The worker may stop when more than `allowed` queries
        took longer than `bound_ms`.
        """
        ...


class BuiltinBackend:
    """Our own loop, in the engine's process."""

    name: Literal["ours", "loadgen"] = "ours"

    def one_by_one(self, scenario: ScenarioName, *, samples_per_query: int, queries: int) -> WorkerRequest:
        """See Backend."""
        return WorkerRequest("one_by_one", {"batch": samples_per_query, "requests": queries})

    def all_at_once(self, *, batch: int, batches: int) -> WorkerRequest:
        """See Backend."""
        return WorkerRequest("one_by_one", {"batch": batch, "requests": batches})

    def by_arrival(
        self, *, queries_per_s: float, queries: int, bound_ms: float, allowed: int, seed: int
    ) -> WorkerRequest:
        """See Backend."""
        return WorkerRequest(
            "by_arrival",
            {
                "requests_per_s": queries_per_s,
                "requests": queries,
                "bound_ms": bound_ms,
                "allowed": allowed,
                "seed": seed,
            },
        )


class Loadgen:
    """MLPerf's loadgen (mlcommons-loadgen), in the engine's process."""

    name: Literal["ours", "loadgen"] = "loadgen"

    def __init__(self) -> None:
        """Raises ConfigInvalid if it is not installed."""
        if importlib.util.find_spec("mlperf_loadgen") is None:
            raise ConfigInvalid(
                "benchmark.scenario_backend is 'loadgen'",
                why="mlcommons-loadgen is not installed",
                fix="install it (pip install mlcommons-loadgen), or set scenario_backend: ours",
            )

    def one_by_one(self, scenario: ScenarioName, *, samples_per_query: int, queries: int) -> WorkerRequest:
        """See Backend."""
        return _loadgen(scenario, queries, samples_per_query=samples_per_query, batch=samples_per_query)

    def all_at_once(self, *, batch: int, batches: int) -> WorkerRequest:
        """See Backend."""
        return _loadgen("Offline", 1, samples_per_query=batch * batches, batch=batch)

    def by_arrival(
        self, *, queries_per_s: float, queries: int, bound_ms: float, allowed: int, seed: int
    ) -> WorkerRequest:
        """See Backend. Loadgen issues all queries, however many are late."""
        return _loadgen(
            "Server", queries, samples_per_query=1, batch=1, queries_per_s=queries_per_s, seed=seed
        )


def _loadgen(
    scenario: ScenarioName,
    queries: int,
    *,
    samples_per_query: int,
    batch: int,
    queries_per_s: float | None = None,
    seed: int = 0,
) -> WorkerRequest:
    return WorkerRequest(
        "loadgen",
        {
            "scenario": scenario,
            "queries": queries,
            "samples_per_query": samples_per_query,
            "batch": batch,
            "queries_per_s": queries_per_s,
            "seed": seed,
        },
    )


BACKENDS: dict[str, type[Backend]] = {"ours": BuiltinBackend, "loadgen": Loadgen}
