"""Where a bundle is from: the run that made it, its plan, and what its steps made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.artifacts.folder import Artifact
from hpml.core.errors import UsageError
from hpml.pipelines import graph, recipe
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.engine.step_artifacts import made_by
from hpml.pipelines.plan import Node, Plan, trace
from hpml.pipelines.recipe import LoadedRecipe


@dataclass(frozen=True)
class Origin:
    """The run of a bundle, in the workspace `home`. export: the step that built the bundle's engine."""

    home: Path
    record: RunRecord
    loaded: LoadedRecipe
    plan: Plan
    export: Node

    def artifact(self, step: str) -> Artifact[Any]:
        """What a step of the run made. Raises as `made_by`."""
        return made_by(self.home, self.record, step, self.loaded.recipe.cluster)

    @property
    def model(self) -> Artifact[Any]:
        """The network, trained and compressed, that the engine was built from. Raises as `made_by`."""
        return self.artifact(str(self.export.inputs["model"]))


def origin_of(bundle: Deployable) -> Origin:
    """Where `bundle` is from. Raises UsageError if its run is not in the workspace, ConfigInvalid if the
    run's recipe cannot be read.
    """
    record = _record_of(bundle)
    loaded = recipe.load_of_run(bundle.home, record)
    plan = trace(graph.graph, loaded.recipe)
    digest = bundle.facts.engine_digest
    export = next(node for node in plan.nodes.values() if _made(record, node.name, digest))
    return Origin(bundle.home, record, loaded, plan, export)


def _record_of(bundle: Deployable) -> RunRecord:
    """The run whose folder the bundle is in; of a copy elsewhere, the newest that built its engine."""
    digest = bundle.facts.engine_digest
    records = [
        record
        for record in run_record.list_runs(bundle.home)
        if any(_made(record, step, digest) for step in record.steps)
    ]
    own = [
        record for record in records if bundle.home.resolve() / record.id in bundle.folder.resolve().parents
    ]
    for record in (*own, *records):
        return record
    raise UsageError(
        f"no run in {bundle.home} has made the engine of {bundle.title}",
        why="its network and its recipe are needed, which a bundle does not hold",
        fix="give --home of the workspace that it was run in; a run in Kubeflow has nothing here:"
        " hpml run its recipe",
    )


def _made(record: RunRecord, step: str, digest: str) -> bool:
    found = record.steps.get(step)
    return found is not None and found.stage == "export" and found.digest == digest
