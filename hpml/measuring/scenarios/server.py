"""Server: queries of one sample arrive at random (a Poisson process); the largest rate with p99 in a bound.

Every trial of a rate has the same arrivals, scaled, for all engines. A trial passes if so few of its queries
took longer than the bound, from their scheduled arrival, that p99 is within it with 99 % confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import ScenarioFigures, ScenarioName
from hpml.measuring.bench import Unmeasured
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.scenarios.base import Scenario, Session, WorkerRequest, ask
from hpml.measuring.scenarios.bisection import PRECISION, Bisection
from hpml.measuring.statistics import allowed_overlatencies, samples_needed

_LEVEL = 0.99
_TRIALS = 4  # about as many are needed where p99 is within the bound at a fair load


@dataclass
class _Search:
    """One engine's search. seconds: left for its trials, as they are planned, repetitions not counted.

    queries: of the largest rate that passed.
    """

    bisection: Bisection
    seconds: float
    bound_ms: float
    queries: int = 0
    reason: str = ""  # why there is nothing to search

    def next_rate(self) -> float | None:
        """The rate of the next trial; None if the search is over, or has no time for it."""
        rate = None if self.reason else self.bisection.next_rate()
        return rate if rate is not None and self.queries_at(rate) / rate <= self.seconds else None

    def queries_at(self, rate: float) -> int:
        """How many queries a trial has: what p99 needs, and as many as show that the rate is too large.

        Where it is by the precision, the backlog is the bound when half of them are answered.
        """
        return max(samples_needed(_LEVEL), math.ceil(rate * _least_trial_s(self.bound_ms)))


def _least_trial_s(bound_ms: float) -> float:
    return 2 * bound_ms / 1e3 / (PRECISION - 1)


class Server(Scenario):
    """The engines take turns in random order, trial by trial."""

    name: ScenarioName = "Server"
    metric = "queries_per_s"

    def measure(self, session: Session) -> dict[str, ScenarioFigures]:
        """The largest rate of every engine, in queries per second; its interval is the last bracket."""
        searches = {name: _search(session, name) for name in session.bench.names}
        rng = np.random.default_rng(session.bench.config.seed)
        unfinished = ""
        try:
            while going := [name for name, search in searches.items() if search.next_rate() is not None]:
                for index in rng.permutation(len(going)):
                    _try_next(session, going[index], searches[going[index]])
        except Unmeasured as error:
            unfinished = str(error)
        config = session.bench.config
        return {name: self._figures(config, search, unfinished) for name, search in searches.items()}

    def unmeasured(self, config: BenchmarkConfig, reason: str = "") -> ScenarioFigures:
        """With the bound."""
        bound = {"latency_bound_ms": config.server_latency_bound_ms}
        return super().unmeasured(config, reason).model_copy(update=bound)

    def _figures(self, config: BenchmarkConfig, search: _Search, unfinished: str) -> ScenarioFigures:
        """unfinished: why all searches were stopped; one that was over by then still counts."""
        if search.reason:
            return self.unmeasured(config, search.reason)
        if unfinished and search.next_rate() is not None:
            return self.unmeasured(config, unfinished)
        found = search.bisection
        if not found.bracketed:
            return self.unmeasured(config, _not_bracketed(search))
        bracket = Interval(value=found.passed, low=found.passed, high=found.failed)
        return self.unmeasured(config).model_copy(update={"value": bracket, "queries": search.queries})


def _search(session: Session, name: str) -> _Search:
    """Nothing is searched where one query alone takes too long, or so long that the time is not enough."""
    config, latency_ms = session.bench.config, session.latency_ms[name][1]
    bound_ms = config.server_latency_bound_ms
    search = _Search(
        bisection=Bisection(ceiling=1e3 / latency_ms),
        seconds=2 * max(config.scenario_seconds, _TRIALS * _least_trial_s(bound_ms)),
        bound_ms=bound_ms,
    )
    needed, affordable = samples_needed(_LEVEL), session.affordable(_TRIALS * latency_ms)
    if latency_ms > bound_ms:
        search.reason = f"one query alone takes {latency_ms:.3g} ms, p99 has to be within {bound_ms:g} ms"
    elif affordable < needed:
        search.reason = session.not_enough(affordable, needed)
    return search


def _not_bracketed(search: _Search) -> str:
    found = search.bisection
    if found.passed:
        return f"{found.passed:.3g} queries per second passed, and there was no time for a rate that does not"
    above = f"p99 is above {search.bound_ms:g} ms even at {found.failed:.3g} queries per second"
    return above if found.next_rate() is None else f"{above}, and there was no time for lower rates"


def _try_next(session: Session, name: str, search: _Search) -> None:
    """One trial of one engine.

    Raises Unmeasured when the time budget is over.
    """
    rate = search.next_rate()
    if rate is None:
        return
    queries = search.queries_at(rate)
    allowed = allowed_overlatencies(queries, _LEVEL)
    arguments = {
        "requests_per_s": rate,
        "requests": queries,
        "bound_ms": search.bound_ms,
        "allowed": allowed,
        "seed": session.bench.config.seed,
    }
    asked = WorkerRequest("by_arrival", arguments)
    reply = ask(session.bench, name, asked, f"serving {rate:.3g} queries per second")
    search.seconds -= queries / rate
    late = sum(latency_ns > search.bound_ms * 1e6 for latency_ns in reply["latency_ns"])
    search.bisection.learn(rate, passes=late <= allowed)
    if late <= allowed:
        search.queries = queries
