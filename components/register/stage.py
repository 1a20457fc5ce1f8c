"""Register the chosen engine in the MLflow model registry."""

from __future__ import annotations

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.register.champion import STANDING_TAG, Standing, conditions
from hpml.components.register.config import RegisterConfig
from hpml.components.register.references import FILE_TAG, MEASUREMENTS_TAG
from hpml.core.contract import Output, Result, canonical_json
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.goals import COMPLETION, DECISION_FILE, DecisionRecord
from hpml.measuring.state_mixture import mixture

_FIGURES = ("latency_ms_p50", "latency_ms_p99", "speedup_vs_reference")


def run(
    config: RegisterConfig,
    *,
    engine: Artifact[EngineSpec],
    measured: Artifact[MeasurementsSpec],
    evaluation: Artifact[EvaluationSpec],
    out: Output,
) -> Result[RegistrationSpec]:
    """Give `engine`, as select wrote it, its version in the registry that MLFLOW_TRACKING_URI names.

    One that is not verified, or was chosen without a figure of the objective, has tags that say so, and does
    not become the champion.
    Raises ConfigInvalid if the model has no name, StageFailed if `engine` was chosen from other measurements
    than `measured`, and Unavailable if the registry does not answer.
    """
    from hpml.components.register.registry import Entry, register

    if not config.model_name:
        raise ConfigInvalid("the model has no name to be registered under", fix="set register.model_name")
    decision = DecisionRecord.model_validate_json(engine.file(DECISION_FILE).read_text())
    if decision.measurements_digest != measured.digest:
        raise StageFailed("the engine was chosen from other measurements", why="the digests differ")
    if decision.engine_digest != evaluation.spec.engine_digest:
        raise StageFailed("another engine was scored on the test split", why="the digests differ")
    standing = Standing(
        goals=decision.goals,
        conditions=conditions(measured.spec, measured.manifest.lineage.parents.get("data", "")),
        figures=decision.figures,
        states=decision.states,
        unit=measured.spec.unit,
    )
    entry = Entry(
        model_name=config.model_name,
        engine=engine,
        engine_digest=decision.engine_digest,
        description=decision.reason,
        tags=config.tags | _tags(engine, decision, standing) | _tags_of_test(evaluation.spec),
        standing=standing,
        doubts=tuple(doubt for doubt in (decision.undecided, *decision.unverified) if doubt),
    )
    spec = register(entry, out.scratch)
    is_champion = "champion" in spec.aliases
    if entry.doubts and not is_champion:
        out.note(f"{spec.champion_reason}; {COMPLETION} completes the measurement")
    return Result(spec, {"version": spec.version, "champion": float(is_champion)})


def _tags(engine: Artifact[EngineSpec], decision: DecisionRecord, standing: Standing) -> dict[str, str]:
    """What the version says of itself; figures are readable, and whole in the tag of its standing.

    The figures are those that are known, also of each state of the cores, with the settings they hold for.
    """
    spec, lineage = engine.spec, engine.manifest.lineage
    tags = {
        "hpml.engine": decision.chosen,
        "hpml.precision": spec.precision,
        "hpml.methods": ", ".join(spec.methods),
        "hpml.target": canonical_json(spec.target),
        "hpml.runs_on": canonical_json(spec.identity),
        "hpml.measured_on": canonical_json(standing.conditions),
        "hpml.goals": canonical_json(decision.goals.model_dump(mode="json")),
        MEASUREMENTS_TAG: decision.measurements_digest,
        "hpml.parents": canonical_json(lineage.parents),
        "hpml.code_digest": lineage.code_digest,
        "hpml.file": spec.file,
        FILE_TAG: engine.manifest.files[spec.file].sha256,
        "hpml.size_bytes": str(spec.size_bytes),
        STANDING_TAG: standing.model_dump_json(),
    }
    figures, states = decision.figures, decision.states
    known = dict(figures.quality) | {name: getattr(figures, name) for name in _FIGURES}
    if len(states) > 1:
        for one in figures.states:
            known[f"latency_ms_p50_{one.state}"] = one.latency_ms_p50
            known[f"speedup_vs_reference_{one.state}"] = one.speedup_vs_reference
    where_known = {
        **{f"hpml.{name}": _in_words(figure) for name, figure in known.items()},
        "hpml.core_states": mixture(states),
        "hpml.settings": canonical_json(figures.settings.model_dump()) if figures.settings else "",
        "hpml.trained_from": spec.origin.in_words() if spec.origin else "",
        "hpml.undecided": decision.undecided,
        "hpml.unverified": "; ".join(decision.unverified),
    }
    return tags | {name: value for name, value in where_known.items() if value}


def _tags_of_test(evaluation: EvaluationSpec) -> dict[str, str]:
    """How good it is on the test split, which nothing was chosen by."""
    figures = {f"hpml.test_{name}": _in_words(figure) for name, figure in evaluation.quality.items()}
    return figures | {"hpml.test_rows": str(evaluation.rows), "hpml.test_split_read": evaluation.test_split}


def _in_words(figure: Interval | None) -> str:
    return f"{figure.value:.4g} ({figure.low:.4g} to {figure.high:.4g})" if figure else ""
