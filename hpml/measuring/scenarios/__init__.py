"""The scenarios of MLPerf Inference, by its definitions, and the closed loop. No result is one of MLPerf.

A scenario is one row of SCENARIOS. `workload` is what runs in the process of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpml.artifacts.measurements import ConcurrencyFigures, ScenarioFigures, ScenarioName
from hpml.measuring.bench import Bench, Unmeasured
from hpml.measuring.scenarios.base import Figures, Load, Scenario, Session, trials
from hpml.measuring.scenarios.closed_loop import ClosedLoop
from hpml.measuring.scenarios.offline import Offline
from hpml.measuring.scenarios.percentile import MultiStream, SingleStream
from hpml.measuring.scenarios.server import Server

SCENARIOS: dict[ScenarioName, Scenario] = {
    "SingleStream": SingleStream(),
    "MultiStream": MultiStream(),
    "Offline": Offline(),
    "Server": Server(),
}

Measured = dict[str, tuple[tuple[ScenarioFigures, ...], tuple[ConcurrencyFigures, ...]]]


def run_all(bench: Bench) -> Measured:
    """The closed loops and the scenarios of the config, of every engine, each in processes of their own.

    Of their own, because torch keeps a pool of threads for every client that ever asked, and is slower from
    then on. The loops come first, because the search of Server takes longest. A figure that the machine or
    the time did not allow is None, with the reason.
    Raises StageFailed that names the engine that crashed.
    """
    config = bench.config
    clients = [ClosedLoop(count) for count in sorted(set(config.concurrency))]
    wanted = [SCENARIOS[name] for name in config.scenarios]
    batches = {*config.timed_batches, *(scenario.samples_per_query for scenario in wanted)}
    loops = _measured(bench, clients, {1})
    scenarios = _measured(bench, wanted, batches)
    return {
        name: (tuple(of[name] for of in scenarios), tuple(of[name] for of in loops)) for name in bench.names
    }


def _measured(
    bench: Bench, loads: Sequence[Load[Figures]], batches: Iterable[int]
) -> list[dict[str, Figures]]:
    """The figures of every engine under each load, in fresh processes."""
    if not loads:
        return []
    with bench.launched():
        try:
            session = Session(bench, trials(bench, sorted(batches)))
        except Unmeasured as error:
            return [_without(bench, load, error) for load in loads]
        return [_figures(session, load) for load in loads]


def _figures(session: Session, load: Load[Figures]) -> dict[str, Figures]:
    try:
        return load.measure(session)
    except Unmeasured as error:
        return _without(session.bench, load, error)


def _without(bench: Bench, load: Load[Figures], error: Unmeasured) -> dict[str, Figures]:
    return dict.fromkeys(bench.names, load.unmeasured(bench.config, str(error)))
