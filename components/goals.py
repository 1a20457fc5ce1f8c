"""The goals of a recipe, and which engine meets them. Pure: select decides with it, report explains with it.

Constraints are judged by the point values of the figures, as a promise to a user is; the objective is judged
by its 95 % intervals, since two engines that the measurement cannot tell apart are equally fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from components.contract import Config
from components.errors import ConfigInvalid, StageFailed
from components.measurements import EngineFigures, Interval, MeasurementsSpec

Objective = Literal["latency_ms_p50", "latency_ms_p99", "throughput", "size_bytes"]

DECISION_FILE = "decision.json"
_SMALLEST_ALLOWED_DROP = 0.001  # 0.1 point; a relative shortfall needs something to be relative to


class Goals(Config):
    """What the chosen engine has to satisfy, and what is then minimised (throughput: maximised)."""

    max_accuracy_drop: float = Field(
        default=0.01, ge=0, le=1
    )  # of top-1, from the reference's; 0.01 = 1 point
    max_latency_ms_p99: float | None = Field(default=None, gt=0)  # batch 1
    max_size_mb: float | None = Field(default=None, gt=0)  # 1 MB = 1e6 bytes
    objective: Objective = "latency_ms_p50"


@dataclass(frozen=True)
class Verdict:
    """Where one engine stands: `outcome`, and `reason` in words.

    shortfall: for a disqualified engine, how far it misses its worst constraint, relative (0.5 = by half).
    """

    outcome: Literal["chosen", "tied", "qualified", "disqualified", "not built", "reference"]
    reason: str
    shortfall: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The verdict on every engine, the chosen one (None if none qualifies), and the nearest to qualifying."""

    verdicts: dict[str, Verdict]
    chosen: str | None
    nearest: str | None
    reason: str


class DecisionRecord(Config):
    """`decision.json` of a chosen engine: why it was chosen, for whoever holds the engine later."""

    goals: Goals
    chosen: str
    reason: str
    engine_digest: str  # of the engine as it was exported, without this file
    measurements_digest: str
    figures: EngineFigures
    reference_figures: EngineFigures
    verdicts: dict[str, Verdict]


def decide(goals: Goals, measurements: MeasurementsSpec) -> Decision:
    """Judge every engine against `goals`.

    Of the engines that meet every constraint, those that no other beats beyond the noise (`is_better`) are
    tied, and the tie goes to the smallest, then to the first by name. The reference (torch eager) is measured
    but cannot be chosen. `nearest` is, where none qualifies, the one with the smallest worst relative
    shortfall.
    Raises StageFailed if the reference was not measured, ConfigInvalid if the objective was not.
    """
    accuracy_to_keep = _reference_accuracy(measurements)
    verdicts: dict[str, Verdict] = {}
    qualified: dict[str, EngineFigures] = {}
    for name, figures in measurements.engines.items():
        if name == measurements.reference:
            verdicts[name] = Verdict("reference", "what the others are compared with, not a candidate")
        elif figures.status == "not built":
            verdicts[name] = Verdict("not built", figures.reason)
        elif misses := _misses(goals, figures, accuracy_to_keep):
            sentence = "; ".join(miss.sentence for miss in misses)
            verdicts[name] = Verdict("disqualified", sentence, max(miss.shortfall for miss in misses))
        else:
            qualified[name] = figures
    if not qualified:
        return _none_qualifies(verdicts)
    return _choose(goals, qualified, verdicts)


def objective_interval(objective: Objective, figures: EngineFigures) -> Interval:
    """The figure that `objective` names, in its own unit; for throughput, images/s at the best batch size.

    Raises ConfigInvalid if the benchmark did not measure it.
    """
    if objective == "size_bytes":
        return Interval(value=figures.size_bytes, low=figures.size_bytes, high=figures.size_bytes)
    if objective == "throughput":
        best = max((item.images_per_s for item in figures.throughput), key=lambda i: i.value, default=None)
        return _measured(best, "goals.objective throughput", figures)
    return _measured(getattr(figures, objective), f"goals.objective {objective}", figures)


def is_better(objective: Objective, one: Interval, other: Interval) -> bool:
    """Whether `one` is better than `other` beyond the noise: their intervals have no point in common."""
    return one.low > other.high if objective == "throughput" else one.high < other.low


def describe(objective: Objective, figure: Interval) -> str:
    """The figure in words, with its interval: "latency p50 0.71 ms (0.69 to 0.73)"."""
    if objective == "size_bytes":
        return f"size {figure.value / 1e6:.4g} MB"
    if objective == "throughput":
        return f"throughput {figure.value:.0f} images/s ({figure.low:.0f} to {figure.high:.0f})"
    percentile = objective.rpartition("_")[2]
    return f"latency {percentile} {figure.value:.3g} ms ({figure.low:.3g} to {figure.high:.3g})"


# ------------------------------------------------------------------------------------------- the constraints


@dataclass(frozen=True)
class _Miss:
    """A constraint that an engine violates, in words, and by how much, relative to what is allowed."""

    sentence: str
    shortfall: float


def _reference_accuracy(measurements: MeasurementsSpec) -> float:
    figures = measurements.engines.get(measurements.reference)
    if figures is None or figures.accuracy_top1 is None:
        raise StageFailed(
            f"the reference {measurements.reference!r} was not measured",
            why="the accuracy that an engine may lose is counted from the reference's",
            fix=f"benchmark one of the engines as reference: {', '.join(measurements.engines) or 'none'}",
        )
    return figures.accuracy_top1.value


def _misses(goals: Goals, figures: EngineFigures, accuracy_to_keep: float) -> list[_Miss]:
    misses = []
    accuracy = _measured(figures.accuracy_top1, "goals.max_accuracy_drop", figures).value
    # Rounded: 0.97 - 0.96 is 0.010000000000000009 in floating point, and is a drop of one point.
    drop = round(accuracy_to_keep - accuracy, 9)
    if drop > goals.max_accuracy_drop:
        excess = drop - goals.max_accuracy_drop
        drop_text, allowed_text = _told_apart(100 * drop, 100 * goals.max_accuracy_drop, digits=1)
        misses.append(
            _Miss(
                f"accuracy drop {drop_text} points, allowed {allowed_text}",
                excess / max(goals.max_accuracy_drop, _SMALLEST_ALLOWED_DROP),
            )
        )
    if goals.max_latency_ms_p99 is not None:
        p99 = _measured(figures.latency_ms_p99, "goals.max_latency_ms_p99", figures)
        misses += _exceeds("latency p99", p99.value, goals.max_latency_ms_p99, "ms")
    if goals.max_size_mb is not None:
        misses += _exceeds("size", figures.size_bytes / 1e6, goals.max_size_mb, "MB")
    return misses


def _exceeds(what: str, value: float, allowed: float, unit: str) -> list[_Miss]:
    if value <= allowed:
        return []
    value_text, allowed_text = _told_apart(value, allowed, digits=2)
    return [_Miss(f"{what} {value_text} {unit}, allowed {allowed_text}", (value - allowed) / allowed)]


def _measured(figure: Interval | None, goal: str, figures: EngineFigures) -> Interval:
    if figure is None:
        raise ConfigInvalid(
            f"{goal} cannot be judged",
            why=f"the benchmark has no such figure for the {figures.precision} {figures.target} engine",
            fix="change the goal, or the benchmark so that it measures this",
        )
    return figure


def _told_apart(value: float, allowed: float, *, digits: int) -> tuple[str, str]:
    """Both numbers with as many decimals as it takes to see that they differ."""
    while digits < 9 and f"{value:.{digits}f}" == f"{allowed:.{digits}f}":
        digits += 1
    return f"{value:.{digits}f}", f"{allowed:.{digits}f}"


# ------------------------------------------------------------------------------------------------ the choice


def _none_qualifies(verdicts: Mapping[str, Verdict]) -> Decision:
    misses = {name: verdict for name, verdict in verdicts.items() if verdict.outcome == "disqualified"}
    if not misses:
        return Decision(dict(verdicts), None, None, "no engine was built")
    nearest = min(misses, key=lambda name: (misses[name].shortfall, name))
    reason = f"no engine meets the goals; the nearest is {nearest}: {misses[nearest].reason}"
    return Decision(dict(verdicts), None, nearest, reason)


def _choose(
    goals: Goals, qualified: Mapping[str, EngineFigures], verdicts: Mapping[str, Verdict]
) -> Decision:
    intervals = {name: objective_interval(goals.objective, figures) for name, figures in qualified.items()}
    tied = [
        name
        for name, interval in intervals.items()
        if not any(is_better(goals.objective, other, interval) for other in intervals.values())
    ]
    chosen = min(tied, key=lambda name: (qualified[name].size_bytes, name))
    figure = describe(goals.objective, intervals[chosen])
    others = sorted(name for name in tied if name != chosen)
    if others:
        reason = f"{figure}, within the noise of {', '.join(others)}, and not larger"
    else:
        reason = f"{figure}, the best of those that meet the goals"
    judged = dict(verdicts)
    for name, interval in intervals.items():
        words = describe(goals.objective, interval)
        if name == chosen:
            judged[name] = Verdict("chosen", reason)
        elif name in tied:
            judged[name] = Verdict("tied", f"{words}, within the noise of {chosen}, which is not larger")
        else:
            judged[name] = Verdict("qualified", f"{words}, beaten beyond the noise")
    return Decision(judged, chosen, None, f"{chosen}: {reason}")
