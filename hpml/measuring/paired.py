"""Engines against each other, round by round and state by state, and whether the rounds tell enough."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import PairedRatio, StateFigures
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.machine.state_clusters import States
from hpml.measuring.rounds import Round, Rounds, state_of
from hpml.measuring.statistics import median, mixture

MIN_ROUNDS = 6  # undisturbed, to quote a figure: the extremes of five hold a median 94 times in 100 only
# Half the width of an interval; beyond it nothing is quoted, unless less precision is asked for.
MAX_HALF_WIDTH = 0.05
_RARE_STATE = 0.05  # of the time; a mixture is quoted without a state that is as rare


# ------------------------------------------------------------------------------- engines and their operations


def subject_name(engine: str, operation: str) -> str:
    """What a further operation of an engine is called while it is timed, such as "fp32/onnx::prefill".

    An engine's own name stands for the operation that goals judge.
    """
    return f"{engine}::{operation}"


def engine_of(name: str, names: Collection[str]) -> str:
    """The engine that `name` is an operation of, or is itself."""
    engine = name.rpartition("::")[0]
    return engine if engine in names else name


def counterpart(engine: str, name: str, names: Collection[str]) -> str:
    """`engine` in the operation that `name` is timed in: an operation is compared with no other."""
    operation = name.removeprefix(engine_of(name, names))
    return f"{engine}{operation}"


def reference_of(config: BenchmarkConfig, names: Sequence[str]) -> str:
    """What speed-ups refer to: what the config names, or the first."""
    return config.reference if config.reference in names else names[0]


# ---------------------------------------------------------------------------------- state by state, paired


@dataclass(frozen=True)
class Batch1Analysis:
    """The rounds at batch 1. p50_ms: of each engine's slices, (rounds,). state: of each round, an index.

    launches: how many rounds each launch had. launch: of each round. widest: as MAX_HALF_WIDTH.
    """

    states: tuple[CoreState, ...]  # at least one
    p50_ms: dict[str, NDArray[np.float64]]
    state: NDArray[np.int64]
    launch: NDArray[np.int64]
    widest: float = MAX_HALF_WIDTH

    @classmethod
    def of(cls, rounds: Rounds, names: Sequence[str], *, precision: float = MAX_HALF_WIDTH) -> Batch1Analysis:
        """What the rounds say. The shares of the states are those of the time of all rounds.

        So also of those at other batch sizes, and of those that do not count: more of them are dropped in
        the state in which engines are slower.
        """
        at_1, states = rounds.at(1), rounds.states()
        return cls(
            states=core_states(rounds.all, states),
            p50_ms={
                name: np.array([float(np.nanmedian(one.latency_ms[name])) for one in at_1]) for name in names
            },
            state=state_of(at_1, states),
            launch=np.array([one.launch for one in at_1], np.int64),
            widest=max(MAX_HALF_WIDTH, precision),
        )

    @property
    def launches(self) -> list[int]:
        """How many rounds each launch has."""
        return counts(self.launch)

    def ratio(self, engine: str, baseline: str) -> PairedRatio:
        """How many times faster `engine` is than `baseline`."""
        known, reasons, unknown_share = [], [], 0.0
        for index, state in enumerate(self.states):
            interval, reason = self._in_state(index, self.p50_ms[baseline] / self.p50_ms[engine])
            if interval:
                known.append((state, interval))
            else:
                reasons.append(f"cores {state.name}: {reason}" if state.name else reason)
                unknown_share += state.share
        is_quoted = bool(known) and unknown_share <= _RARE_STATE
        measured = sum(state.share for state, _ in known)
        return PairedRatio(
            engine=engine,
            baseline=baseline,
            rounds=len(self.state),
            speedup=mixture([(state.share / measured, one) for state, one in known]) if is_quoted else None,
            states={state.name: interval for state, interval in known if state.name},
            reason="" if is_quoted else "; ".join(reasons),
        )

    def figures(self, name: str, reference: str, fastest_fp32: str) -> tuple[StateFigures, ...]:
        """Those of one engine in each state; none where there is only one."""
        if len(self.states) == 1:
            return ()
        described = []
        ratios = self.ratio(name, reference).states
        best = self.ratio(name, fastest_fp32).states if fastest_fp32 else {}
        for index, state in enumerate(self.states):
            p50, reason = self._in_state(index, self.p50_ms[name])
            described.append(
                StateFigures(
                    state=state.name,
                    rounds=int((self.state == index).sum()),
                    latency_ms_p50=p50,
                    speedup_vs_reference=ratios.get(state.name),
                    speedup_vs_best_fp32=best.get(state.name),
                    reason=reason,
                )
            )
        return tuple(described)

    def _in_state(self, index: int, of_rounds: NDArray[np.float64]) -> tuple[Interval | None, str]:
        """The median of a figure of the rounds in a state; or why there is none that may be quoted."""
        rows = self.state == index
        if rows.sum() < MIN_ROUNDS:
            return None, f"{rows.sum()} of {MIN_ROUNDS} undisturbed rounds"
        interval = median(of_rounds[rows], counts(self.launch[rows]))
        half_width = _half_width(interval)
        if half_width > self.widest:
            return None, f"known to within {half_width:.1%} only, {self.widest:.0%} is allowed"
        return interval, ""


def core_states(rounds: Sequence[Round], states: States | None) -> tuple[CoreState, ...]:
    """The states as the artifact carries them; one without a distance where none was probed."""
    if states is None:
        nothing = Interval(value=0, low=0, high=0)
        return (CoreState(name="", round_trip_ns=nothing, share=1, seconds=0),)
    of_round = state_of(rounds, states)
    took_s = np.array([one.seconds for one in rounds])
    return states.described([float(took_s[of_round == index].sum()) for index in range(len(states.names))])


def compared(rounds: Rounds, names: Sequence[str], *, precision: float) -> dict[str, Any]:
    """What the rounds say of all engines together, as fields of `MeasurementsSpec`.

    Of pairs each two engines are one, the later against the earlier, in each operation.
    """
    at_1 = Batch1Analysis.of(rounds, names, precision=precision)
    return {
        "pairs": tuple(
            at_1.ratio(engine, baseline)
            for baseline, engine in itertools.combinations(names, 2)
            if baseline == counterpart(engine_of(baseline, names), engine, names)
        ),
        "states": at_1.states if rounds.states() else (),
        "rounds": len(at_1.state),
        "rounds_of_launches": tuple(at_1.launches),
    }


# ----------------------------------------------------------------------------------------- is it enough?


def is_precise(rounds: Rounds, config: BenchmarkConfig, names: Sequence[str]) -> bool:
    """Whether more rounds would tell nothing that was asked for.

    There are as many rounds and launches as asked for; every speed-up is known to within `config.precision`
    in each state that was seen for 5 % of the time.
    """
    batches = config.timed_batches
    if rounds.launches < config.launches or min(len(rounds.at(batch)) for batch in batches) < config.rounds:
        return False
    at_1 = Batch1Analysis.of(rounds, names, precision=config.precision)
    reference = reference_of(config, names)
    lasting = [state.name for state in at_1.states if state.share > _RARE_STATE]
    for name in names:
        ratio = at_1.ratio(name, counterpart(reference, name, names))
        known = ratio.states if len(at_1.states) > 1 else {"": ratio.speedup}
        intervals = [known.get(state) for state in lasting]
        if not all(interval and _half_width(interval) <= config.precision for interval in intervals):
            return False
    return True


def missing(rounds: Rounds, config: BenchmarkConfig, names: Sequence[str]) -> str:
    """Which figures there are too few undisturbed rounds for, in words; empty if all can be quoted."""
    batches = config.timed_batches
    latencies = rounds.latencies(names, batches)
    found = []
    at_1 = Batch1Analysis.of(rounds, names, precision=config.precision)
    reference = reference_of(config, names)
    reasons = {at_1.ratio(name, counterpart(reference, name, names)).reason for name in names} - {""}
    if len(names) == 1:
        reasons = set() if len(at_1.state) >= MIN_ROUNDS else {f"{len(at_1.state)} of {MIN_ROUNDS} rounds"}
    if reasons:
        found.append(f"latency at batch 1 ({'; '.join(sorted(reasons))})")
    few = [
        str(batch)
        for batch in config.batch_sizes
        if any(len(undisturbed_rows(latencies[name][batch])) < MIN_ROUNDS for name in names)
    ]
    if few:
        found.append(f"throughput at batch {', '.join(few)}")
    return "; ".join(found)


def _half_width(interval: Interval) -> float:
    return math.sqrt(interval.high / interval.low) - 1


def counts(launch: NDArray[np.int64]) -> list[int]:
    """How many rounds each launch has, those without any left out."""
    return [int(count) for count in np.bincount(launch) if count] if len(launch) else []


def undisturbed_rows(latency_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The slices in which no request was disturbed, (rounds, requests).

    A disturbance hits long requests rather than short ones: what is left of a slice has too short a tail.
    """
    rows: NDArray[np.float64] = latency_ms[np.isfinite(latency_ms).all(axis=1)]
    return rows
