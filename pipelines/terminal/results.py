"""What a finished run found: the table of its variants, the choice, and where things are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.text import Text

from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.core.atomic_files import write_text_atomic
from hpml.measuring.goals import Decision, decide
from hpml.pipelines import recipe
from hpml.pipelines.engine.run_record import FINISHED, RunRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.recipe import LoadedRecipe
from hpml.pipelines.terminal import console
from hpml.reporting.evaluation import test_score_in_words

_RECIPE = "recipe.yaml"


def store_recipe(home: Path, record: RunRecord, loaded: LoadedRecipe) -> None:
    """Keep the resolved recipe with the run."""
    write_text_atomic(home / record.id / _RECIPE, recipe.to_yaml(loaded.recipe))


def show(home: Path, record: RunRecord, output: str) -> bool:
    """Print what the run found so far to stdout; returns whether there was anything measured."""
    measured = _made_by("benchmark", home, record)
    evaluation = _made_by("evaluate", home, record)
    folder = (home / record.id).resolve()
    paths = {
        name: str(path)
        for name, path in (("report", folder / "report" / "report.html"), ("bundle", folder / "bundle"))
        if path.exists()
    }
    decision = None
    if measured:
        goals = recipe.load_of_run(home, record).recipe.goals
        decision = decide(goals, measured.spec)
    tested = test_score_in_words(evaluation.spec) if evaluation and evaluation.spec.engine else ""
    if output == "json":
        _print_json(record, measured, evaluation, decision, paths)
    elif measured and decision and output == "markdown":
        print(console.variants_markdown(measured.spec, decision))
        if tested:
            print(f"\n{tested}")
        if measured.spec.incomplete:
            lacking = measured.spec.incomplete.removeprefix("not measured: ")
            print(f"\nNot all is measured: {lacking}. To complete it: hpml bench {record.id}")
    elif measured and decision:
        console.print_variants(measured.spec, decision)
        console.out.print(Text(decision.reason), soft_wrap=True)
        if tested:
            console.out.print(Text(tested), soft_wrap=True)
        for name, path in paths.items():
            console.out.print(Text(f"{name}: {path}"), soft_wrap=True)
    return measured is not None


def _made_by(stage: str, home: Path, record: RunRecord) -> Artifact[Any] | None:
    for step in record.steps.values():
        if step.stage == stage and step.status in FINISHED and step.digest:
            return Store(home).open(step.digest)
    return None


def _print_json(
    record: RunRecord,
    measured: Artifact[MeasurementsSpec] | None,
    evaluation: Artifact[EvaluationSpec] | None,
    decision: Decision | None,
    paths: dict[str, str],
) -> None:
    answer = {
        "run": record.id,
        "status": record.status,
        "seconds": record.seconds,
        "chosen": decision.chosen if decision else None,
        "reason": decision.reason if decision else "",
        "undecided": decision.undecided if decision else "",
        "unverified": decision.unverified if decision else (),
        "measurements": measured.spec.model_dump(mode="json") if measured else None,
        "evaluation": evaluation.spec.model_dump(mode="json") if evaluation else None,
        "verdicts": {name: vars(verdict) for name, verdict in decision.verdicts.items()} if decision else {},
        "steps": {name: step.model_dump(mode="json") for name, step in record.steps.items()},
        **paths,
    }
    print(json.dumps(answer, indent=2))
