"""The registry is told what became of a rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow.exceptions import MlflowException

from hpml.components.register.registry import CHAMPION
from hpml.core.errors import UsageError, shortened
from hpml.io import tracking

_TAG = "hpml.deployment"
_MOST_CHARACTERS = 5000  # of a tag's value, in servers of before June 2025; MLflow 3.17 takes 100,000
_MOST_PROBLEMS = 3


def record_deployment(
    uri: str,
    name: str,
    version: str,
    *,
    place: str,
    told: Mapping[str, Any],
    file: str,
    becomes_champion: bool,
) -> None:
    """Note `told` (who, what, when, against which figures) at a version, in a tag of the place.

    file: of the workspace, that has all of `told`.
    becomes_champion: whether the champion's alias moves to it.
    Raises UsageError if the registry at `uri` has no such version, Unavailable if it does not answer.
    """
    tracking.ensure_store(uri)
    with tracking.store_lock(uri), tracking.reaching(uri):
        client = tracking.client(uri, timeout_s=60, retries=2)
        try:
            client.set_model_version_tag(name, version, f"{_TAG}.{place}", _as_tag(told, file))
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise UsageError(
                f"the registry has no {name}/{version}", why=f"it is {tracking.without_credentials(uri)}"
            ) from None
        if becomes_champion:
            client.set_registered_model_alias(name, CHAMPION, version)


def _as_tag(told: Mapping[str, Any], file: str) -> str:
    """`told` as JSON; where that is too long, its essentials, and the file that has the rest."""
    whole = json.dumps(told)
    if len(whole) <= _MOST_CHARACTERS:
        return whole
    kept = {name: shortened(str(told[name]), 100) for name in ("when", "who", "name", "place", "outcome")}
    digests = {name: told[name] and told[name]["digest"] for name in ("release", "former")}
    # Of the words of a server: any character may be among them, and JSON makes six or twelve of some.
    problems = [shortened(ascii(problem)[1:-1], 200) for problem in told["problems"][:_MOST_PROBLEMS]]
    return json.dumps({**kept, **digests, "problems": problems, "limits": told["limits"], "rest": file})
