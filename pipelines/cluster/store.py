"""How this machine comes to use the store that the pods of a cluster use."""

from __future__ import annotations

import base64
import os
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from hpml.core.errors import Unavailable
from hpml.io.tracking import without_credentials
from hpml.pipelines.cluster.client import Namespace, Resource, connect
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.engine.object_store import ObjectStore

SECRETS = Resource("v1", "secrets")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_ENDPOINT = "AWS_ENDPOINT_URL"
_OTHERS = ("AWS_REGION", "AWS_SESSION_TOKEN")
_CONNECT_S = 5.0


def open_store(home: Path, config: ClusterConfig, say: Callable[[str], None]) -> ObjectStore:
    """The cluster's store, for the workspace `home`. Raises Unavailable like `use_store`."""
    use_store(connect(config.namespace, patience_s=0, say=say), config, say)
    return ObjectStore(home, config.store, say)


def use_store(cluster: Namespace, config: ClusterConfig, say: Callable[[str], None]) -> None:
    """Put into this process's environment what its pods get from the store's Secret, if we may read that.

    Without that right, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the environment are used. In either
    case AWS_ENDPOINT_URL of the environment counts more than the Secret's, which may be a name that only the
    cluster knows. Raises Unavailable if there are no credentials, or nothing answers at the endpoint.
    """
    secret = config.store_secret
    may_read = cluster.may("get", SECRETS, secret)
    found = cluster.get(SECRETS, secret) if may_read else None
    if found:
        given = {key: base64.b64decode(value).decode() for key, value in (found.get("data") or {}).items()}
        for key in (*_KEYS, *_OTHERS):  # the cluster's, not those of an account that this shell is used with
            os.environ.pop(key, None)
        here = {_ENDPOINT: os.environ.get(_ENDPOINT) or given.get(_ENDPOINT, "")}
        used = {key: given.get(key, "") for key in (*_KEYS, *_OTHERS)} | here
        os.environ.update({key: text for key, text in used.items() if text})
    elif all(os.environ.get(key) for key in _KEYS):
        why = "is not there" if may_read else "may not be read by you"
        say(f"the Secret {secret} {why}: the store is used with AWS_ACCESS_KEY_ID of the environment")
    else:
        why = f"there is no Secret {secret} in the namespace {config.namespace}"
        if not may_read:
            why = f"you may not read the Secret {secret}, and the environment has no AWS_ACCESS_KEY_ID"
        raise Unavailable(
            f"there are no credentials for the store {config.store}",
            why=why,
            fix="k8s/make-secrets makes the Secret; or export AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"
            " AWS_ENDPOINT_URL",
        )
    _reach(os.environ.get(_ENDPOINT, ""), config)


def _reach(endpoint: str, config: ClusterConfig) -> None:
    """Raise Unavailable unless something listens at `endpoint`; an empty one is AWS's own."""
    parts = urlsplit(endpoint)
    if not parts.hostname or urllib.request.getproxies().get(parts.scheme):
        return  # it is asked through a proxy, if at all
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_S).close()
    except OSError as error:
        service = parts.hostname.partition(".")[0]
        raise Unavailable(
            f"the store at {without_credentials(endpoint)} cannot be reached from here",
            why=error.strerror or str(error),
            fix=f"if it is in the cluster: kubectl -n {config.namespace} port-forward service/{service}"
            f" {port}, and export {_ENDPOINT}=http://127.0.0.1:{port}",
        ) from None
