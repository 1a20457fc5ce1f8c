"""Choose one engine under the recipe's goals; refuse when none qualifies."""

from __future__ import annotations

from hpml.artifacts.engine import EngineSpec, copy_engine
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.artifacts.metric import MetricFacts
from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Output, Result
from hpml.core.errors import GateFailed, StageFailed
from hpml.measuring.goals import (
    DECISION_FILE,
    Decision,
    DecisionRecord,
    Goals,
    decide,
    metric_of,
    objective_interval,
)


def run(
    config: Goals,
    *,
    measured: Artifact[MeasurementsSpec],
    engines: dict[str, Artifact[EngineSpec]],
    out: Output,
) -> Result[EngineSpec]:
    """Write the chosen engine itself, of its variants the one that was measured, with `decision.json`.

    What is not measured keeps no engine out; `decision.json` says what the choice was made without.
    Raises GateFailed naming the nearest engine and what it misses if none meets the goals, and StageFailed
    if `measured` is not about these engines.
    """
    _check_measured(measured, engines)
    decision = decide(config, measured.spec)
    if decision.chosen is None:
        raise GateFailed(decision.reason, fix=_what_to_loosen(decision))
    chosen = engines[decision.chosen]
    figures, reference = (measured.spec.engines[name] for name in (decision.chosen, measured.spec.reference))
    record = DecisionRecord(
        goals=config,
        chosen=decision.chosen,
        reason=decision.reason,
        engine_digest=chosen.digest,
        measurements_digest=measured.digest,
        figures=figures,
        operations={name: one.of(decision.chosen) for name, one in measured.spec.operations.items()},
        reference_figures=reference,
        verdicts=decision.verdicts,
        metrics=measured.spec.metrics,
        undecided=decision.undecided,
        states=measured.spec.states,
        cpu=measured.spec.environment.get("cpu", ""),
    )
    spec = copy_engine(chosen, figures.variant, out.path)
    write_text_atomic(out.path / DECISION_FILE, record.model_dump_json(indent=1))
    metric = metric_of(config, measured.spec)
    return Result(spec, _metrics(config, metric, decision, figures, reference))


def _check_measured(measured: Artifact[MeasurementsSpec], engines: dict[str, Artifact[EngineSpec]]) -> None:
    """Figures are only worth something for the very files they were taken of."""
    parents = measured.manifest.lineage.parents
    for name in measured.spec.engines:
        if name not in engines:
            raise StageFailed(
                f"the engine {name!r} was measured but is not given",
                why=f"given: {', '.join(sorted(engines)) or 'none'}",
            )
        if parents.get(f"engines/{name}") != engines[name].digest:
            raise StageFailed(
                f"the figures of {name!r} were taken of another engine than the given one",
                why="the digests differ",
                fix="benchmark these engines and select from that",
            )


def _what_to_loosen(decision: Decision) -> str:
    if decision.nearest is None:
        return "see why each engine was not built: " + "; ".join(
            f"{name}: {verdict.reason}"
            for name, verdict in decision.verdicts.items()
            if verdict.outcome == "not built"
        )
    return "loosen the goals, or train and compress for what it misses"


def _metrics(
    goals: Goals,
    metric: MetricFacts,
    decision: Decision,
    figures: EngineFigures,
    reference: EngineFigures,
) -> dict[str, float]:
    objective = objective_interval(goals.objective, figures)
    outcomes = [verdict.outcome for verdict in decision.verdicts.values()]
    metrics = {
        "size_bytes": float(figures.size_bytes),
        "qualified_engines": float(sum(outcome in ("chosen", "tied", "qualified") for outcome in outcomes)),
    }
    if objective:
        name = goals.objective
        metrics |= {name: objective.value, f"{name}_low": objective.low, f"{name}_high": objective.high}
    metrics |= {name: interval.value for name, interval in figures.quality.items()}
    loss = metric.loss(figures.quality[metric.name].value, reference.quality[metric.name].value)
    metrics["quality_loss"] = loss
    speedups = {name: getattr(figures, name) for name in ("speedup_vs_reference", "speedup_vs_best_fp32")}
    return metrics | {name: interval.value for name, interval in speedups.items() if interval}
