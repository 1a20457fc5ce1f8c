"""The registry is told what became of a rollout."""

from __future__ import annotations

from mlflow.exceptions import MlflowException

from hpml.components.register.registry import CHAMPION
from hpml.core.errors import UsageError
from hpml.io import tracking

_TAG = "hpml.deployment"
_MOST_CHARACTERS = 5000  # of the value of a tag, in MLflow


def record_deployment(
    uri: str, name: str, version: str, *, place: str, told: str, becomes_champion: bool
) -> None:
    """Note `told` (JSON: who, what, when, against which figures) at a version, in a tag of the place.

    becomes_champion: whether the champion's alias moves to it.
    Raises UsageError if the registry at `uri` has no such version, Unavailable if it does not answer.
    """
    tracking.ensure_store(uri)
    with tracking.store_lock(uri), tracking.reaching(uri):
        client = tracking.client(uri, timeout_s=60, retries=2)
        try:
            client.set_model_version_tag(name, version, f"{_TAG}.{place}", told[:_MOST_CHARACTERS])
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise UsageError(
                f"the registry has no {name}/{version}", why=f"it is {tracking.without_credentials(uri)}"
            ) from None
        if becomes_champion:
            client.set_registered_model_alias(name, CHAMPION, version)
