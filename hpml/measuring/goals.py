"""The goals of a recipe, and which engine meets them. Pure: select decides with it, report explains with it.

Constraints are judged by the point values of the figures, as a promise to a user is; the objective is judged
by 95 % intervals, since two engines that the measurement cannot tell apart are equally fast: that of the
paired ratio for latency p50, those of the two figures for what is not paired. What is not known keeps
nobody out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, model_validator

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, OperationFigures
from hpml.artifacts.metric import ACCURACY_TOP1, MetricFacts
from hpml.core.contract import Config, renamed
from hpml.core.errors import ConfigInvalid, StageFailed

Objective = Literal["latency_ms_p50", "latency_ms_p99", "throughput", "size_bytes"]

DECISION_FILE = "decision.json"
COMPLETION = "hpml bench RUN"  # with the run's id for RUN: measures on where a benchmark stopped
QUANTITIES: dict[Objective, str] = {
    "latency_ms_p50": "latency",
    "latency_ms_p99": "latency p99",
    "throughput": "throughput",
    "size_bytes": "size",
}
_SMALLEST_ALLOWED_LOSS = 0.001  # 0.1 point or percent; a relative shortfall needs something to be relative to


class Goals(Config):
    """What the chosen engine has to satisfy, and what is then minimised (throughput: maximised)."""

    metric: str = ""  # of the task, that quality is judged by; empty: the task's default
    # How much worse than the reference's: of a share in points (0.01 = 1 point), else relative (0.01 = 1 %).
    max_quality_loss: float = Field(default=0.01, ge=0)
    max_latency_ms_p99: float | None = Field(default=None, gt=0)  # batch 1
    max_size_mb: float | None = Field(default=None, gt=0)  # 1 MB = 1e6 bytes
    objective: Objective = "latency_ms_p50"

    @model_validator(mode="before")
    @classmethod
    def _by_their_names_of_before(cls, given: Any) -> Any:
        return renamed(given, max_accuracy_drop="max_quality_loss")


@dataclass(frozen=True)
class Verdict:
    """Where one engine stands: `outcome`, and `reason` in words.

    shortfall: for a disqualified engine, how far it misses its worst constraint, relative (0.5 = by half).
    unverified: the goals of a candidate that could not be checked for want of a figure, in words.
    """

    outcome: Literal["chosen", "tied", "qualified", "disqualified", "not built", "reference"]
    reason: str
    shortfall: float = 0.0
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The verdict on every engine, the chosen one (None if none qualifies), and the nearest to qualifying.

    undecided: what of the objective is not measured, so that another candidate may be better than the chosen.
    """

    verdicts: dict[str, Verdict]
    chosen: str | None
    nearest: str | None
    reason: str
    undecided: str = ""

    @property
    def unverified(self) -> tuple[str, ...]:
        """The goals that the chosen engine was not checked for, in words."""
        return self.verdicts[self.chosen].unverified if self.chosen else ()


class DecisionRecord(Config):
    """`decision.json` of a chosen engine: why it was chosen, for whoever holds the engine later."""

    goals: Goals
    chosen: str
    reason: str
    engine_digest: str  # of the engine as it was exported, without this file
    measurements_digest: str
    figures: EngineFigures
    operations: dict[str, OperationFigures] = Field(default_factory=dict)  # further ones, of it alone
    reference_figures: EngineFigures
    verdicts: dict[str, Verdict]
    undecided: str = ""  # as in `Decision`
    states: tuple[CoreState, ...] = ()  # of the cores, that the figures are of
    cpu: str = ""  # that the figures were taken on; of versions before unknown
    metrics: tuple[MetricFacts, ...] = (ACCURACY_TOP1,)  # of the task; the first is its default

    @property
    def unverified(self) -> tuple[str, ...]:
        """The goals that the chosen engine was not checked for, in words."""
        return self.verdicts[self.chosen].unverified


def decide(goals: Goals, measurements: MeasurementsSpec) -> Decision:
    """Judge every engine against `goals`.

    Quality and size have to meet theirs; a latency that is not known keeps nobody out, but is marked as not
    verified. Of the candidates, those that no other is known to beat are tied, and the tie goes to the
    smallest, then to the first by name. The reference (torch eager) is measured but cannot be chosen.
    `nearest` is, where none qualifies, the one with the smallest worst relative shortfall.
    Raises StageFailed if the quality of the reference is not known, ConfigInvalid if that of another is not,
    or if the task has no such metric.
    """
    metric = metric_of(goals, measurements)
    to_keep = _reference_quality(metric, measurements)
    verdicts: dict[str, Verdict] = {}
    candidates: dict[str, EngineFigures] = {}
    for name, figures in measurements.engines.items():
        if name == measurements.reference:
            verdicts[name] = Verdict("reference", "what the others are compared with, not a candidate")
        elif figures.status == "not built":
            verdicts[name] = Verdict("not built", figures.reason)
        elif misses := _misses(goals, metric, figures, to_keep):
            sentences, shortfalls = zip(*misses, strict=True)
            verdicts[name] = Verdict("disqualified", "; ".join(sentences), max(shortfalls))
        else:
            candidates[name] = figures
    if not candidates:
        return _none_qualifies(verdicts)
    return _choose(goals, measurements, candidates, verdicts)


def objective_interval(objective: Objective, figures: EngineFigures) -> Interval | None:
    """The figure that `objective` names, in its own unit; for throughput, rows/s at the best batch size."""
    if objective == "size_bytes":
        return Interval(value=figures.size_bytes, low=figures.size_bytes, high=figures.size_bytes)
    if objective == "throughput":
        return max((item.rows_per_s for item in figures.throughput), key=lambda i: i.value, default=None)
    figure: Interval | None = getattr(figures, objective)
    return figure


def is_better(objective: Objective, one: Interval, other: Interval) -> bool:
    """Whether `one` is better than `other` beyond the noise: their intervals have no point in common."""
    return one.low > other.high if objective == "throughput" else one.high < other.low


def describe(objective: Objective, figure: Interval | None, unit: str = "images") -> str:
    """The figure in words, with its interval: "latency p50 0.71 ms (0.69 to 0.73)"."""
    if figure is None:
        return f"{QUANTITIES[objective]} is not measured"
    if objective == "size_bytes":
        return f"size {figure.value / 1e6:.4g} MB"
    if objective == "throughput":
        return f"throughput {figure.value:.0f} {unit}/s ({figure.low:.0f} to {figure.high:.0f})"
    percentile = objective.rpartition("_")[2]
    return f"latency {percentile} {figure.value:.3g} ms ({figure.low:.3g} to {figure.high:.3g})"


# ------------------------------------------------------------------------------------------- the constraints


def metric_of(goals: Goals, measurements: MeasurementsSpec) -> MetricFacts:
    """The metric that `goals` go by. Raises ConfigInvalid if the task has none of that name."""
    known = {metric.name: metric for metric in measurements.metrics}
    if goals.metric and goals.metric not in known:
        raise ConfigInvalid(
            f"goals.metric is {goals.metric!r}",
            why="the task has no such metric",
            fix=f"give one of {', '.join(known)}",
        )
    return known.get(goals.metric, measurements.metrics[0])


def _reference_quality(metric: MetricFacts, measurements: MeasurementsSpec) -> float:
    figures = measurements.engines.get(measurements.reference)
    if figures is None or metric.name not in figures.quality:
        raise StageFailed(
            f"the reference {measurements.reference!r} was not measured",
            why=f"the {metric.label} that an engine may lose is counted from the reference's",
            fix=f"benchmark one of the engines as reference: {', '.join(measurements.engines) or 'none'}",
        )
    return figures.quality[metric.name].value


def _misses(
    goals: Goals, metric: MetricFacts, figures: EngineFigures, to_keep: float
) -> list[tuple[str, float]]:
    """The constraints that an engine violates, in words, and by how much, relative to what is allowed."""
    if metric.name not in figures.quality:
        raise ConfigInvalid(
            "goals.max_quality_loss cannot be judged",
            why=f"the {metric.label} of the {figures.precision} {figures.target} engine is not known",
        )
    # Rounded: 0.97 - 0.96 is 0.010000000000000009 in floating point, and is a loss of one point.
    loss = round(metric.loss(figures.quality[metric.name].value, to_keep), 9)
    p99_ms = figures.latency_ms_p99.value if figures.latency_ms_p99 else None
    constraints = (  # value, allowed, decimals; and what a shortfall is relative to, at least
        (
            f"{metric.label} worse by",
            metric.loss_unit,
            100 * loss,
            100 * goals.max_quality_loss,
            1,
            100 * _SMALLEST_ALLOWED_LOSS,
        ),
        ("latency p99", "ms", p99_ms, goals.max_latency_ms_p99, 2, 0.0),
        ("size", "MB", figures.size_bytes / 1e6, goals.max_size_mb, 2, 0.0),
    )
    misses = []
    for what, unit, value, allowed, digits, least in constraints:
        if value is not None and allowed is not None and value > allowed:
            value_text, allowed_text = _told_apart(value, allowed, digits=digits)
            sentence = f"{what} {value_text} {unit}, allowed {allowed_text}"
            misses.append((sentence, (value - allowed) / max(allowed, least)))
    return misses


def _unverified(goals: Goals, figures: EngineFigures) -> tuple[str, ...]:
    """The goals that `figures` say nothing about, in words."""
    if goals.max_latency_ms_p99 is None or figures.latency_ms_p99 is not None:
        return ()
    why = figures.unquoted.get("latency_ms_p99") or figures.reason
    because = f": {why}" if why else ""
    return (f"latency p99, allowed {goals.max_latency_ms_p99:g} ms, is not measured{because}",)


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
    goals: Goals,
    measurements: MeasurementsSpec,
    candidates: Mapping[str, EngineFigures],
    verdicts: Mapping[str, Verdict],
) -> Decision:
    race = _Race(goals.objective, measurements, candidates)
    chosen = race.chosen
    judged = dict(verdicts)
    for name, figures in candidates.items():
        judged[name] = replace(race.verdict(name), unverified=_unverified(goals, figures))
    return Decision(judged, chosen, None, f"{chosen}: {judged[chosen].reason}", race.undecided)


class _Race:
    """The candidates against each other, and what is said of the outcome."""

    def __init__(
        self, objective: Objective, measurements: MeasurementsSpec, candidates: Mapping[str, EngineFigures]
    ) -> None:
        self.objective = objective
        self._measurements = measurements
        self._unit = measurements.unit
        # Versions before paired engines with two references only, and did not say with which rounds.
        self._is_paired = objective == "latency_ms_p50" and bool(measurements.pairs)
        self._sizes = {name: figures.size_bytes for name, figures in candidates.items()}
        self._figures = {name: objective_interval(objective, of) for name, of in candidates.items()}
        self._names = sorted(candidates)
        unbeaten = [name for name in self._names if not self._beaters(name)]
        self.unbeaten = unbeaten or self._names  # each beaten by another: ratios of other rounds each
        self.chosen = min(self.unbeaten, key=lambda name: (self._sizes[name], name))
        self.undecided = self._unknown()

    def verdict(self, name: str) -> Verdict:
        """Where a candidate stands."""
        if name == self.chosen:
            return Verdict("chosen", self._why_chosen())
        if name in self.unbeaten:
            return Verdict("tied", self._why_not(name))
        return Verdict("qualified", self._why_beaten(name))

    def _unknown(self) -> str:
        """What is not known, so that another may be better than the chosen one; empty if all is."""
        quantity = QUANTITIES[self.objective]
        absent = [name for name in self.unbeaten if self._figures[name] is None]
        if len(absent) == len(self._names):
            return f"{quantity} is not measured"
        if absent:
            return f"{quantity} of {', '.join(absent)} is not measured"
        unknown = [name for name in self._rivals() if self._beats(name, self.chosen) is None]
        return f"{quantity} is not compared with that of {', '.join(unknown)}" if unknown else ""

    def _why_chosen(self) -> str:
        """The figure of the chosen one, and what it has before the others."""
        figure = self._described(self.chosen)
        if len(self._names) == 1:
            return f"{figure}: the only one that meets the goals"
        if self.undecided:
            known = "" if self._figures[self.chosen] is None else f"{figure}; "
            all_unbeaten = len(self.unbeaten) == len(self._names)
            whom = "the candidates" if all_unbeaten else "those that no other is known to beat"
            return f"{known}{self.undecided}: {self._smallest_of(whom)}"
        if rivals := self._rivals():
            return f"{figure}, not told apart from {', '.join(rivals)}: {self._smallest_of('them')}"
        return f"{figure}, the best of those that meet the goals"

    def _why_not(self, name: str) -> str:
        """Of one that no other beats: why the chosen one goes before it."""
        is_smaller = self._sizes[self.chosen] < self._sizes[name]
        after = f"{self.chosen} is smaller" if is_smaller else f"{self.chosen} is as small, and first by name"
        apart = "" if self._beats(name, self.chosen) is None else f", not told apart from {self.chosen}"
        return f"{self._described(name)}{apart}; {after}"

    def _why_beaten(self, name: str) -> str:
        """By whom, and by how much where they were paired."""
        beaters = self._beaters(name)
        beater = self.chosen if self.chosen in beaters else beaters[0]
        ratio = self._ratio(beater, name)
        by = f" {ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
        return f"{self._described(name)}, beaten by {beater}{by}"

    def _described(self, name: str) -> str:
        return describe(self.objective, self._figures[name], self._unit)

    def _rivals(self) -> list[str]:
        return [name for name in self.unbeaten if name != self.chosen]

    def _smallest_of(self, whom: str) -> str:
        is_smallest = all(self._sizes[self.chosen] < self._sizes[name] for name in self._rivals())
        return f"the smallest of {whom}{'' if is_smallest else ', and the first by name'}"

    def _beaters(self, name: str) -> list[str]:
        return [other for other in self._names if other != name and self._beats(other, name)]

    def _beats(self, one: str, other: str) -> bool | None:
        """Whether `one` is better than `other` beyond the noise; None where that is not known."""
        if self._is_paired:
            ratio = self._ratio(one, other)
            return ratio.low > 1 if ratio else None
        mine, theirs = self._figures[one], self._figures[other]
        return is_better(self.objective, mine, theirs) if mine and theirs else None

    def _ratio(self, one: str, other: str) -> Interval | None:
        pair = self._measurements.ratio(one, other) if self._is_paired else None
        return pair.speedup if pair else None
