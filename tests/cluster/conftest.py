"""A real cluster through KUBECONFIG, with `k8s/overlays/test` applied: `make test-cluster`.

These tests create and delete in the namespaces hpml and hpml-test-*. So that nobody runs them against the
wrong cluster by having a KUBECONFIG, they also ask for HPML_TEST_CLUSTER.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "hpml"
CPU_IMAGE, CLIENT_IMAGE = "localhost/hpml-cpu:test", "localhost/hpml-client:test"
MOTO_IMAGE = "localhost/hpml-moto:test"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a cluster, unless one was named on purpose."""
    if os.environ.get("HPML_TEST_CLUSTER"):
        return
    skip = pytest.mark.skip(reason="no cluster: KUBECONFIG=... make test-cluster")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


def kubectl(*arguments: str, stdin: str = "", check: bool = True) -> str:
    """What `kubectl` prints on stdout."""
    answer = subprocess.run(
        ["kubectl", *arguments], input=stdin or None, capture_output=True, text=True, check=False
    )
    if check and answer.returncode:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {answer.stderr}")
    return answer.stdout


def kubectl_json(*arguments: str) -> Any:
    """What `kubectl ... -o json` prints."""
    return json.loads(kubectl(*arguments, "-o", "json"))


def wait_until(condition: Callable[[], Any], what: str, *, seconds: float = 120) -> Any:
    """The first true value of `condition`; an AssertionError that says `what` if there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@pytest.fixture(scope="session")
def cluster() -> None:
    """A cluster that answers, with the test images on a node."""
    assert shutil.which("kubectl"), "make test-cluster needs kubectl on PATH"
    for image in (CPU_IMAGE, CLIENT_IMAGE, MOTO_IMAGE):  # a node lists what was loaded with some delay
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


@dataclass(frozen=True)
class Workspace:
    """The namespace, its S3 and its MLflow as this machine reaches them; `environment` is for `hpml`."""

    namespace: str
    store_endpoint: str
    mlflow: str
    environment: dict[str, str]


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
        "stringData": {**credentials, "AWS_ENDPOINT_URL": "http://seaweedfs:8333"},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    try:
        for name in ("seaweedfs", "mlflow"):
            kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=240s")
        with forwarded("seaweedfs", 8333) as store, forwarded("mlflow", 5000) as mlflow:
            environment = {**credentials, "AWS_ENDPOINT_URL": store}
            _make_bucket(environment)
            yield Workspace(NAMESPACE, store, mlflow, environment)
    finally:
        kubectl("delete", "-k", str(ROOT / "k8s" / "overlays" / "test"), "--ignore-not-found", check=False)


def _make_bucket(environment: dict[str, str]) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )
    client.create_bucket(Bucket="hpml")


@contextmanager
def forwarded(service: str, port: int) -> Iterator[str]:
    """The URL at which this machine reaches a service of the namespace."""
    command = ["kubectl", "-n", NAMESPACE, "port-forward", f"service/{service}", f":{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, f"no port was forwarded to {service}"
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()
