"""What a step of a run made, from wherever it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpml.artifacts.folder import Artifact
from hpml.core.errors import StageFailed, UsageError
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.engine.store import Store


def made_by(home: Path, record: RunRecord, name: str, cluster: ClusterConfig) -> Artifact[Any]:
    """What the finished step `name` made: from the workspace's store, or from the cluster's that it ran in.

    Raises UsageError if that is in Kubeflow's store, StageFailed if it is gone or damaged, Unavailable.
    """
    step = record.steps[name]
    if not step.digest:
        raise UsageError(f"what run {record.id} made is not here", why="it is in Kubeflow's store")
    here = Store(home)
    if here.object_path(step.digest).exists():
        return here.open(step.digest)
    again = f"hpml run {record.recipe_file}"
    if record.store:
        from hpml.pipelines.cluster.store import open_store
        from hpml.pipelines.terminal.console import err

        store = open_store(home, cluster, lambda text: err.print(text, markup=False, soft_wrap=True))
        if store.lookup(step.key) == step.digest:
            return store.open(step.digest)
        again += " --executor kubernetes"
    raise StageFailed(
        f"what step {name} of run {record.id} made ({step.digest[:12]}) is no longer in"
        f" {record.store or 'the workspace'}",
        why="hpml gc removes what old runs made",
        fix=again,
    )
