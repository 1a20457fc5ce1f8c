"""The scenarios of MLPerf Inference, by its definitions, and the closed loop. No result is one of MLPerf.

A scenario is one file here and one row of SCENARIOS. `workload` and `loadgen` are what runs in the process of
the engine.
"""

from __future__ import annotations

from hpml.artifacts.measurements import ConcurrencyFigures, ScenarioFigures, ScenarioName
from hpml.measuring.bench import Bench, batch_sizes
from hpml.measuring.scenarios.backends import BACKENDS
from hpml.measuring.scenarios.base import Scenario, Session, Unmeasured, trials
from hpml.measuring.scenarios.closed_loop import closed_loop
from hpml.measuring.scenarios.multi_stream import MultiStream
from hpml.measuring.scenarios.offline import Offline
from hpml.measuring.scenarios.server import Server
from hpml.measuring.scenarios.single_stream import SingleStream

LONGEST_S = 10.0

SCENARIOS: dict[ScenarioName, Scenario] = {
    "SingleStream": SingleStream(),
    "MultiStream": MultiStream(),
    "Offline": Offline(),
    "Server": Server(),
}

Measured = dict[str, tuple[tuple[ScenarioFigures, ...], tuple[ConcurrencyFigures, ...]]]


def run_all(bench: Bench, *, longest_s: float = LONGEST_S) -> Measured:
    """The closed loops and the scenarios of the config, of every engine, each in processes of their own.

    Of their own, because torch keeps a pool of threads for every client that ever asked, and is slower from
    then on. The loops come first, because the search of Server takes longest.
    longest_s: what one scenario may take of one engine. A figure that the machine or the time did not allow
    is None, with the reason.
    Raises ConfigInvalid if the backend of the config is not installed, and StageFailed that names the engine
    that crashed.
    """
    config = bench.config
    loops: list[dict[str, ConcurrencyFigures]] = []
    scenarios: list[dict[str, ScenarioFigures]] = []
    if clients := sorted(set(config.concurrency)):
        with bench.launched():
            loops = _loops(bench, clients, longest_s)
    if config.scenarios:
        with bench.launched():
            scenarios = _scenarios(bench, longest_s)
    return {
        name: (tuple(of[name] for of in scenarios), tuple(of[name] for of in loops)) for name in bench.names
    }


def _loops(bench: Bench, clients: list[int], longest_s: float) -> list[dict[str, ConcurrencyFigures]]:
    try:
        session = _session(bench, {1}, longest_s)
    except Unmeasured as error:
        return [_loop_without(bench, count, str(error)) for count in clients]
    return [_loop(session, count) for count in clients]


def _scenarios(bench: Bench, longest_s: float) -> list[dict[str, ScenarioFigures]]:
    names = bench.config.scenarios
    try:
        batches = {*batch_sizes(bench.config), *(SCENARIOS[name].samples_per_query for name in names)}
        session = _session(bench, batches, longest_s)
    except Unmeasured as error:
        return [_without(bench, name, str(error)) for name in names]
    return [_scenario(session, name) for name in names]


def _session(bench: Bench, batches: set[int], longest_s: float) -> Session:
    backend = BACKENDS[bench.config.scenario_backend]()
    return Session(bench, backend, trials(bench, sorted(batches)), longest_s)


def _scenario(session: Session, scenario: ScenarioName) -> dict[str, ScenarioFigures]:
    try:
        return SCENARIOS[scenario].measure(session)
    except Unmeasured as error:
        return _without(session.bench, scenario, str(error))


def _loop(session: Session, clients: int) -> dict[str, ConcurrencyFigures]:
    try:
        return closed_loop(session, clients)
    except Unmeasured as error:
        return _loop_without(session.bench, clients, str(error))


def _without(bench: Bench, scenario: ScenarioName, reason: str) -> dict[str, ScenarioFigures]:
    return {name: SCENARIOS[scenario].unmeasured(bench.config, reason) for name in bench.names}


def _loop_without(bench: Bench, clients: int, reason: str) -> dict[str, ConcurrencyFigures]:
    return {name: ConcurrencyFigures(clients=clients, reason=reason) for name in bench.names}
