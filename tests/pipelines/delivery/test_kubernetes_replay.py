"""Recorded requests in a cluster: they reach the pod that asks, whole, and leave the store after that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests as http

from hpml.core.errors import StageFailed, Unavailable, UsageError
from hpml.io import storage
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.destinations import kubernetes
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig
from hpml.pipelines.delivery.kubernetes.place import KubernetesPlace
from hpml.pipelines.executors import cluster_job
from hpml.serving.rollout import fetch
from tests.pipelines.delivery.releases import release, seen
from tests.pipelines.fake_jobs import FakeJobs, Write
from tests.serving.small_bundles import as_request

CONFIG = KubernetesConfig(name="small", image="hpml-serving:1")
A = release("a" * 12).model_copy(update={"settings": CONFIG.model_dump(mode="json")})
URI = "s3://hpml/replays/hpml/small.jsonl"
TEXT = as_request(np.zeros((1, 1, 4, 4), np.float32))[0].decode() + "\n"


@pytest.fixture
def cluster(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJobs]:
    """With a store, whose keys nobody here has yet."""
    for module in (kube, cluster_job):
        monkeypatch.setattr(module, "LOOK_EVERY_S" if module is kube else "_LOOK_EVERY_S", 0.05)
    secret = {"AWS_ACCESS_KEY_ID": "theirs", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name in (*secret, "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "")  # so that what `use_store` sets does not outlive the test
        monkeypatch.delenv(name)
    http.post(f"{s3_endpoint}/moto-api/reset", timeout=10)
    http.put(f"{s3_endpoint}/hpml", timeout=10)
    fake = FakeJobs()
    fake.add_secret("hpml-store", AWS_ENDPOINT_URL=s3_endpoint, **secret)
    with fake.serving() as serving:
        monkeypatch.setenv("KUBECONFIG", str(serving.kubeconfig(tmp_path / "kubeconfig")))
        yield serving


@pytest.fixture
def place(cluster: FakeJobs, tmp_path: Path) -> KubernetesPlace:
    """As `hpml deploy --replay` makes it."""
    (tmp_path / "requests.jsonl").write_text(TEXT)
    options = DeployOptions(name="small", replay=tmp_path / "requests.jsonl", ready_s=20)
    return kubernetes.place(options, tmp_path, lambda line: None)


def fetched(pod: dict[str, Any], folder: Path) -> str:
    """What the pod finds once its init containers have run."""
    (init,) = [one for one in pod["spec"]["initContainers"] if one["name"] == "fetch-requests"]
    (container,) = pod["spec"]["containers"]
    *_, option, uri, file, sha256 = init["command"]
    assert option == "--file" and container["command"][-2:] == ["--requests", file]
    assert init["envFrom"] == [{"secretRef": {"name": "hpml-store"}}] and "envFrom" not in container
    fetch.main(["--file", uri, str(folder / "requests"), sha256])
    return (folder / "requests").read_text()


def test_the_pod_has_them_and_then_nobody(cluster: FakeJobs, place: KubernetesPlace, tmp_path: Path) -> None:
    found: list[str] = []

    def program(pod: dict[str, Any], write: Write, _stop: threading.Event) -> int:
        found.append(fetched(pod, tmp_path))
        write(seen(A).model_dump_json())
        return 0

    cluster.program = program
    assert place.smoke(A, beside_stable=True) == seen(A)
    assert found == [TEXT]
    assert not storage.exists(URI)


def test_they_are_gone_too_after_a_pod_that_failed(cluster: FakeJobs, place: KubernetesPlace) -> None:
    def program(pod: dict[str, Any], write: Write, _stop: threading.Event) -> int:
        assert storage.exists(URI)
        write("error: it ended")
        return 4

    cluster.program = program
    with pytest.raises(Unavailable, match="it ended"):
        place.smoke(A, beside_stable=True)
    assert not storage.exists(URI)


def test_a_pod_takes_no_other_file(cluster: FakeJobs, place: KubernetesPlace, tmp_path: Path) -> None:
    refused: list[StageFailed] = []

    def program(pod: dict[str, Any], write: Write, _stop: threading.Event) -> int:
        storage.write_text(URI, TEXT.replace("0.0", "0.1"))
        (init,) = [one for one in pod["spec"]["initContainers"] if one["name"] == "fetch-requests"]
        with pytest.raises(StageFailed, match="was changed: its SHA-256 is another") as caught:
            fetch.fetch_file(URI, tmp_path / "requests", init["command"][-1])
        refused.append(caught.value)
        return 4

    cluster.program = program
    with pytest.raises(Unavailable):
        place.smoke(A, beside_stable=True)
    assert refused


def test_without_a_store_it_is_refused_before_anything_is_served(cluster: FakeJobs, tmp_path: Path) -> None:
    cluster.remove("secrets", "hpml-store")
    (tmp_path / "requests.jsonl").write_text(TEXT)
    options = DeployOptions(name="small", replay=tmp_path / "requests.jsonl")
    with pytest.raises(Unavailable, match="no credentials for the store s3://hpml"):
        kubernetes.place(options, tmp_path, lambda line: None)
    kubernetes.place(DeployOptions(name="small"), tmp_path, lambda line: None)  # others do not need one


def test_what_fetches_is_told_what_it_takes() -> None:
    with pytest.raises(SystemExit) as ended:
        fetch.main(["--file", URI])
    assert ended.value.code == UsageError.exit_code
