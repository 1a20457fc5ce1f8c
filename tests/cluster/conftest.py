"""A real cluster through KUBECONFIG, with `k8s/overlays/test` applied: `make test-cluster`.

These tests create and delete in the namespaces hpml and hpml-test-*. So that nobody runs them against the
wrong cluster by having a KUBECONFIG, they also ask for HPML_TEST_CLUSTER.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.access import (
    CLIENT_IMAGE,
    CPU_IMAGE,
    MOTO_IMAGE,
    NAMESPACE,
    ROOT,
    SERVING_IMAGE,
    Workspace,
    forwarded,
    kubectl,
    kubectl_json,
    wait_until,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a cluster, unless one was named on purpose."""
    if os.environ.get("HPML_TEST_CLUSTER"):
        return
    skip = pytest.mark.skip(reason="no cluster: KUBECONFIG=... make test-cluster")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cluster() -> None:
    """A cluster that answers, with the test images on a node."""
    assert shutil.which("kubectl"), "make test-cluster needs kubectl on PATH"
    for image in (
        CPU_IMAGE,
        CLIENT_IMAGE,
        MOTO_IMAGE,
        SERVING_IMAGE,
    ):  # a node lists what was loaded with some delay
        wait_until(
            lambda image=image: image in _images(), f"a node has the image {image}: tests/cluster/images"
        )


def _images() -> set[str]:
    """The names of the images that nodes say they have."""
    return {
        name
        for node in kubectl_json("get", "nodes")["items"]
        for image in node["status"].get("images", ())
        for name in image["names"] or ()
    }


@pytest.fixture(scope="session")
def workspace(cluster: None) -> Iterator[Workspace]:
    """The namespace hpml from `k8s/overlays/test`, its bucket made; removed in the end."""
    kubectl("apply", "-k", str(ROOT / "k8s" / "overlays" / "test"))
    credentials = {
        "AWS_ACCESS_KEY_ID": secrets.token_hex(8),
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        "AWS_REGION": "us-east-1",
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hpml-store", "namespace": NAMESPACE},
        "stringData": {**credentials, "AWS_ENDPOINT_URL": "http://seaweedfs.hpml:8333"},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    try:
        for name in ("seaweedfs", "mlflow"):
            kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=240s")
        with forwarded("seaweedfs", 8333) as store, forwarded("mlflow", 5000) as mlflow:
            environment = {**credentials, "AWS_ENDPOINT_URL": store}
            yield Workspace(NAMESPACE, store, mlflow, environment)
    finally:
        kubectl("delete", "-k", str(ROOT / "k8s" / "overlays" / "test"), "--ignore-not-found", check=False)
