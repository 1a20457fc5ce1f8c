"""A model registry in MLflow: one version per engine, its files as they are, its place among the others.

An engine is registered as raw files with its manifest, not in one of MLflow's flavours: loading those runs
code from the registry, while `open_artifact` checks the digest of each downloaded file. An `MLmodel` file
beside them gives MLflow the signature.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema
from mlflow.types import TensorSpec as MlflowTensor

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, Artifact, copy_files
from hpml.artifacts.operation import TensorSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.register.champion import Standing, judge
from hpml.components.register.references import DIGEST_TAG, FILE_TAG
from hpml.core.errors import ConfigInvalid
from hpml.io import tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE, CHAMPION = "candidate", "champion"


@dataclass(frozen=True)
class Entry:
    """What is to be registered: the engine, its digest as it was exported, and what its version says.

    doubts: what is not known of it, in words; with any, it does not become the champion.
    """

    model_name: str
    engine: Artifact[EngineSpec]
    engine_digest: str
    description: str
    tags: Mapping[str, str]
    standing: Standing
    doubts: tuple[str, ...] = ()


def register(entry: Entry, scratch: Path) -> RegistrationSpec:
    """Register `entry` in the registry that the environment names (MLFLOW_TRACKING_URI).

    The same engine gets the same version each time; its tags then say what was measured last.
    Raises ConfigInvalid if no registry is named, Unavailable if it does not answer.
    """
    if not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
        raise ConfigInvalid("no model registry is named", fix="set MLFLOW_TRACKING_URI, or use hpml run")
    uri = mlflow.get_tracking_uri()
    tracking.ensure_store(uri)
    with tracking.store_lock(uri), tracking.reaching(uri):
        client = tracking.client(uri, timeout_s=120, retries=2)  # a server may take its time with an upload
        version = _version(client, uri, entry, scratch)
        _update(client, version, entry)
        client.set_registered_model_alias(entry.model_name, CANDIDATE, str(version.version))
        reason = _crown(client, version, entry)
        aliases = client.get_registered_model(entry.model_name).aliases
    number = int(version.version)
    return RegistrationSpec(
        registry=tracking.without_credentials(uri),
        model_name=entry.model_name,
        version=number,
        aliases=tuple(sorted(alias for alias, of in aliases.items() if int(of) == number)),
        engine_digest=entry.engine_digest,
        champion_reason=reason,
    )


def _version(client: MlflowClient, uri: str, entry: Entry, scratch: Path) -> ModelVersion:
    """The version of the engine, made if there is none.

    A server cannot be locked, so two runs may both make one: the lower number counts and the other goes.
    """
    try:
        client.create_registered_model(entry.model_name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = _versions(client, entry)
    if known:
        return known[0]
    model_id = _upload(client, tracking.experiment_id(client, uri, entry.model_name), entry, scratch)
    made = client.create_model_version(
        entry.model_name,
        source=f"models:/{model_id}",
        model_id=model_id,
        tags={DIGEST_TAG: entry.engine_digest, **entry.tags},
        description=entry.description,
    )
    first = _versions(client, entry)[0]
    if int(first.version) != int(made.version):
        client.delete_model_version(entry.model_name, str(made.version))
        client.delete_logged_model(model_id)
    return first


def _versions(client: MlflowClient, entry: Entry) -> list[ModelVersion]:
    """The versions of this very engine, and of its variants the same; the lowest first."""
    query = f"name = '{entry.model_name}' and tags.`{DIGEST_TAG}` = '{entry.engine_digest}'"
    found = client.search_model_versions(query)
    same = [version for version in found if version.tags.get(FILE_TAG) == entry.tags[FILE_TAG]]
    return sorted(same, key=lambda version: int(version.version))


def _upload(client: MlflowClient, experiment: str, entry: Entry, scratch: Path) -> str:
    """Store the engine's files in the registry; the id of the MLflow model that holds them."""
    folder = scratch / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_files(entry.engine, folder)
    shutil.copyfile(entry.engine.path / MANIFEST, folder / MANIFEST)
    tags = {DIGEST_TAG: entry.engine_digest}
    model_id: str = client.create_logged_model(experiment, name=entry.model_name, tags=tags).model_id
    try:
        Model(signature=_signature(entry.engine.spec), flavors={}, model_id=model_id).save(folder / "MLmodel")
        client.log_model_artifacts(model_id, str(folder))
        client.finalize_logged_model(model_id, "READY")
    except BaseException:
        with suppress(Exception):
            client.finalize_logged_model(model_id, "FAILED")
        raise
    return model_id


def _signature(spec: EngineSpec) -> ModelSignature:
    operation = spec.operations[0]
    return ModelSignature(inputs=_schema(operation.inputs), outputs=_schema(operation.outputs))


def _schema(tensors: Iterable[TensorSpec]) -> Schema:
    """MLflow calls what is free -1."""
    return Schema(
        [
            MlflowTensor(
                np.dtype(one.dtype), [size if isinstance(size, int) else -1 for size in one.shape], one.name
            )
            for one in tensors
        ]
    )


def _update(client: MlflowClient, version: ModelVersion, entry: Entry) -> None:
    """Bring what the version says up to the last measurement; what that does not say any more goes."""
    for name in version.tags:
        if name.startswith("hpml.") and name not in {DIGEST_TAG, *entry.tags}:
            client.delete_model_version_tag(entry.model_name, str(version.version), name)
    for name, value in entry.tags.items():
        if version.tags.get(name) != value:
            client.set_model_version_tag(entry.model_name, str(version.version), name, value)
    if version.description != entry.description:
        client.update_model_version(entry.model_name, str(version.version), entry.description)


def _crown(client: MlflowClient, version: ModelVersion, entry: Entry) -> str:
    """Move the champion's alias to `version` if it is better; why, or why not."""
    holder = client.get_registered_model(entry.model_name).aliases.get(CHAMPION)
    if holder is not None and int(holder) == int(version.version):
        return "it is the champion already"
    champion = client.get_model_version(entry.model_name, str(holder)).tags if holder is not None else None
    moves, reason = judge(entry.standing, champion, entry.doubts)
    if moves:
        client.set_registered_model_alias(entry.model_name, CHAMPION, str(version.version))
    return reason
