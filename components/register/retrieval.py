"""Engines come back from the registry as they were registered, every file verified."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, Artifact, open_artifact
from hpml.core.errors import UsageError
from hpml.io import tracking

_UNKNOWN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def registered_engine(
    uri: str, name: str, *, alias: str = "", version: str = "", folder: Path
) -> tuple[Artifact[EngineSpec], str]:
    """The engine of a version of the model `name` in the registry at `uri`, and the version's number.

    alias, version: one of them says which. folder: where engines are kept once they were fetched.
    Raises Unavailable if the registry does not answer, UsageError if it has no such version, StageFailed if
    what it has is damaged.
    """
    tracking.ensure_store(uri)
    with tracking.reaching(uri):
        client = tracking.client(uri, timeout_s=60, retries=2)
        try:
            found = (
                client.get_model_version_by_alias(name, alias)
                if alias
                else client.get_model_version(name, version)
            )
        except MlflowException as error:
            if error.error_code not in _UNKNOWN:
                raise
            raise UsageError(
                f"there is no registered model {name}{f'@{alias}' if alias else f'/{version}'}",
                why=f"the registry is {tracking.without_credentials(uri)}",
            ) from None
        engine = folder / f"{name}-{found.version}"
        if not (engine / MANIFEST).is_file():
            mlflow.set_tracking_uri(uri)
            _fetch(f"models:/{name}/{found.version}", engine)
    return open_artifact(engine, kind="engine"), str(found.version)


def _fetch(uri: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetched = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=f"{scratch}/engine"))
        open_artifact(fetched, kind="engine")
        with suppress(OSError):  # another server has fetched it by now
            fetched.rename(folder)
