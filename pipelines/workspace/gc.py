"""`hpml gc`: what no kept run and no registered version needs goes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpml.components.register.references import references
from hpml.core.errors import Unavailable
from hpml.io.tracking import store_of
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.garbage import Needed, Removed
from hpml.pipelines.engine.store import Store
from hpml.pipelines.terminal import console

_DAY_S = 24 * 3600.0


def collect_workspace(home: Path, keep_runs: int, *, keep_registered: bool, dry_run: bool) -> list[Removed]:
    """Clear the store of the workspace.

    Raises Unavailable while a run is under way, or if a registry that is to be asked does not answer.
    """
    store = Store(home)
    with store.alone():
        registries = _registries(home) if keep_registered else []
        return store.collect(_needed(home, keep_runs, registries), dry_run=dry_run)


def collect_cluster(
    home: Path,
    cluster: ClusterConfig,
    keep_runs: int,
    *,
    keep_registered: bool,
    grace_days: float,
    dry_run: bool,
) -> list[Removed]:
    """Clear the store of a cluster, in which many workspaces may have results.

    What any run used in the last `grace_days` stays. Raises Unavailable if the store cannot be reached, or a
    registry that is to be asked does not answer.
    """
    from hpml.pipelines.cluster.store import open_store

    store = open_store(home, cluster, lambda text: console.err.print(text, markup=False, soft_wrap=True))
    registries = _registries(home, cluster.tracking_uri) if keep_registered else []
    needed = _needed(home, keep_runs, registries)
    return store.collect(needed, grace_s=grace_days * _DAY_S, dry_run=dry_run)


def show(removed: list[Removed], *, dry_run: bool) -> None:
    """Say what went, or list what would."""
    if dry_run:
        for item in removed:
            print(f"{item.size_bytes / 1e6:10.1f} MB  {item.name}")
    size_mb = sum(item.size_bytes for item in removed) / 1e6
    print(f"{'would remove' if dry_run else 'removed'} {len(removed)} items, {size_mb:.1f} MB")


def _needed(home: Path, keep_runs: int, registries: Iterable[str]) -> Needed:
    """What the newest runs of the workspace and the versions in `registries` need."""
    try:
        versions = tuple(version for uri in registries for version in references(uri))
    except Unavailable as error:
        raise Unavailable(
            "what registered versions were made from is not known, and nothing was removed",
            why=str(error),
            fix="or give --no-keep-registered, and it goes, too",
        ) from None
    steps = [step for record in run_record.list_runs(home)[:keep_runs] for step in record.steps.values()]
    return Needed(
        digests=frozenset(step.digest for step in steps if step.digest),
        keys=frozenset(step.key for step in steps if step.key),
        versions=versions,
    )


def _registries(home: Path, of_cluster: str = "") -> list[str]:
    """The registries that runs of this workspace may have registered in.

    of_cluster: as its pods see it; MLFLOW_TRACKING_URI, where it is set, is how we do.
    """
    own = store_of(home) if (home / "mlflow.db").exists() else ""
    named = os.environ.get("MLFLOW_TRACKING_URI") or of_cluster
    return [uri for uri in dict.fromkeys((named, own)) if uri]
