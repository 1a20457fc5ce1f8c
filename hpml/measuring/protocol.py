"""In which order what is timed. In each round every engine is timed once, in a new random order.

So that a disturbance, or the machine's clock, meets all engines alike, and figures of one round can be
compared. A round is short, some tenths of a second: it has to lie between two bursts of whatever else runs,
and within one distance of the cores. One engine works at a time; the processes of the others are stopped. The
rounds are spread over several launches of all engines: where a process happens to get its memory decides a
few percent of its speed, and only fresh processes average that out (Kalibera and Jones 2013, "Rigorous
benchmarking in reasonable time").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hpml.core.contract import Output
from hpml.measuring.bench import Bench
from hpml.measuring.paired import is_precise, missing
from hpml.measuring.rounds import Rounds, round_orders
from hpml.measuring.samples import RoundCheckpoint, RoundPlan
from hpml.measuring.settings import choose_settings


def time_rounds(bench: Bench, out: Output) -> Rounds:
    """Time all engines until everything is known as precisely as the config asks, or the time budget is over.

    If then something is not known at all, the time of the scenarios is used for it, too. Rounds that earlier
    attempts kept in `out.scratch` count; those of this one are kept there as well.
    """
    config = bench.config
    kept = RoundCheckpoint(out.scratch, bench.names)
    plan, rounds = kept.read()
    if plan:
        bench.settings, bench.requests = plan.settings, plan.requests
    else:
        bench.settings = choose_settings(bench, out)
    orders = round_orders(bench.names, seed=config.seed + len(rounds))
    bench.grant(config.time_budget_s)
    until_s = bench.deadline_s
    extended_s = until_s + (config.scenario_budget_s if config.scenarios or config.concurrency else 0.0)
    for launch in itertools.count(rounds.launches):
        if is_precise(rounds, config, bench.names):
            break
        if bench.is_over:
            if bench.now_s() > extended_s or not missing(rounds, config, bench.names):
                break
            bench.grant(extended_s - bench.now_s())
        before = len(rounds)
        try:
            _time_launch(bench, rounds, launch, orders, out)
        finally:
            kept.add(RoundPlan(settings=bench.settings, requests=bench.requests), rounds.all[before:])
    bench.grant(max(0.0, config.scenario_budget_s - max(0.0, bench.now_s() - until_s)))
    return rounds


def _time_launch(bench: Bench, rounds: Rounds, launch: int, orders: Iterator[list[str]], out: Output) -> None:
    """Time one launch: its share of the rounds, or what its share of the time allows.

    But for at least as long as launching took, so that half of the time is measured. Those after the planned
    ones, since figures of launches still disagree, leave out the batch sizes that have their rounds.
    """
    config = bench.config
    to_come = max(1, config.launches - launch)  # of those planned, with this one
    late = launch >= config.launches
    wanted = math.ceil(config.rounds / config.launches)
    begun_s = bench.now_s()
    left_s = bench.deadline_s - begun_s
    share_s = min(left_s, config.time_budget_s / config.launches) if late else left_s / to_come
    batches = [b for b in config.timed_batches if b == 1 or not late or len(rounds.at(b)) < config.rounds]
    have = dict.fromkeys(batches, 0)
    with bench.launched():
        launched_s = bench.now_s()
        until_s = max(begun_s + share_s, 2 * launched_s - begun_s)
        for batch in itertools.cycle(_schedule(batches)):
            timed = bench.time_round(next(orders), batch, launch)
            rounds.all.append(timed)
            have[batch] += bool(timed.latency_ms)
            out.progress(min(len(rounds.at(1)), config.rounds), config.rounds, "rounds")
            if min(have.values()) >= wanted or bench.now_s() > until_s:
                break


def _schedule(batches: Sequence[int]) -> list[int]:
    """The batch sizes of a few rounds: every other one is at batch 1, of which most is asked."""
    return [batch for other in batches if other != 1 for batch in (1, other)] or [1]
