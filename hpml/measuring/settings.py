"""With which threads, and spinning or not, each engine is fastest on this machine.

Chosen on rounds that are not reported: of settings that are chosen by the very rounds that are reported, the
figures would hold the winner's luck.
"""

from __future__ import annotations

import itertools

import numpy as np

from hpml.artifacts.measurements import EngineSettings
from hpml.core.contract import Output
from hpml.measuring.bench import Bench
from hpml.measuring.paired import MIN_ROUNDS, engine_of
from hpml.measuring.rounds import round_orders

_ROUNDS = 25
_SHARE_OF_BUDGET = 0.25  # of the time of the rounds, at most
_CLEARLY_FASTER = 1.02  # than what the runtime does by itself, to be preferred to it


def choose_settings(bench: Bench, out: Output) -> dict[str, EngineSettings]:
    """The settings of each engine of `bench`: those of its runtime where others are not clearly faster.

    So it is, too, where the machine is too busy to tell. All operations of an engine have those that are
    fastest for the one that goals judge: it is served with one build and one pool of threads.
    """
    candidates: dict[str, list[EngineSettings]] = {}
    for name, subject in bench.subjects.items():
        if engine_of(name, bench.names) != name:
            continue
        known = subject.candidates(bench.threads)
        allowed = [settings for settings in known if bench.config.threads in (None, settings.threads)]
        if len(allowed) > 1:
            candidates[name] = allowed
    tried = {f"{name}, {one}": (name, one) for name, allowed in candidates.items() for one in allowed}
    p50_ms = _p50_ms(bench.of_trials(tried), out) if tried else []
    if len(p50_ms) < MIN_ROUNDS:
        return bench.settings
    chosen = dict(bench.settings)
    for name, allowed in candidates.items():
        took_ms = np.array([[one[f"{name}, {settings}"] for settings in allowed] for one in p50_ms])
        speedups = np.median(took_ms[:, :1] / took_ms, axis=0)
        best = int(speedups.argmax())
        chosen[name] = allowed[best if speedups[best] > _CLEARLY_FASTER else 0]
    return {name: chosen[engine_of(name, bench.names)] for name in bench.names}


def _p50_ms(trials: Bench, out: Output) -> list[dict[str, float]]:
    """The p50 of each trial in each round, while there is time."""
    until_s = trials.now_s() + _SHARE_OF_BUDGET * trials.config.time_budget_s
    found: list[dict[str, float]] = []
    with trials.launched():
        for order in itertools.islice(round_orders(trials.names, seed=trials.config.seed), 10 * _ROUNDS):
            if len(found) >= _ROUNDS or trials.now_s() > until_s:
                break
            timed = trials.time_round(order, 1, 0)
            if timed.latency_ms:
                found.append({name: float(np.nanmedian(ms)) for name, ms in timed.latency_ms.items()})
            out.progress(len(found), _ROUNDS, "rounds to choose the settings")
    return found
