"""`hpml doctor` against a cluster: what it finds, what it advises, and that it never breaks off."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpml.pipelines.cluster import doctor as cluster_doctor
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.cluster.finding import Finding
from hpml.pipelines.workspace import doctor
from tests.pipelines.fake_jobs import FakeJobs

Json = dict[str, Any]
ALL_IMAGES = ("hpml-cpu:0.1.0", "hpml-client:0.1.0")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJobs]:
    """A cluster that has everything."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    fake = FakeJobs()
    for account in ("hpml-stage", "hpml-launcher"):
        fake.add("serviceaccounts", {"metadata": {"name": account}})
    for service in ("mlflow", "ml-pipeline"):
        fake.add("services", {"metadata": {"name": service, "namespace": "kubeflow"}})
    fake.add_secret("hpml-store", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    fake.add_secret("kubeflow/hpml-store", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    fake.add("rolebindings", {"metadata": {"name": "kubeflow/hpml-launcher"}})
    fake.add(
        "configmaps", {"metadata": {"name": "kubeflow/kfp-launcher"}, "data": {"defaultPipelineRoot": ""}}
    )
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    fake.add("storageclasses", {"metadata": {"name": "fast", "annotations": default}})
    fake.add(
        "deployments",
        {
            "metadata": {"name": "training-operator", "namespace": "kubeflow"},
            "status": {"availableReplicas": 1},
        },
    )
    names = [[f"docker.io/library/{image}"] for image in ALL_IMAGES]
    images = [{"names": name} for name in names] + [{"names": None}]
    fake.add(
        "nodes",
        {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}, "images": images}},
    )
    groups = [
        {"versions": [{"groupVersion": "batch/v1"}, {"groupVersion": "kubeflow.org/v1"}]},
        {"versions": [{"groupVersion": "trainer.kubeflow.org/v1alpha1"}]},
    ]
    fake.paths = {
        "/version": {"gitVersion": "v1.34.4"},
        "/apis": {"groups": groups},
        "/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]},
        "/apis/trainer.kubeflow.org/v1alpha1": {"resources": [{"name": "trainjobs"}]},
    }
    monkeypatch.setattr(cluster_doctor, "use_store", lambda *_: None)
    monkeypatch.setattr("hpml.io.storage.list_names", lambda _: [])
    with fake.serving() as serving:
        monkeypatch.setenv("KUBECONFIG", str(serving.kubeconfig(tmp_path / "kubeconfig")))
        yield serving


def findings(**config: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in cluster_doctor.examine(ClusterConfig.model_validate(config))}


def test_a_cluster_that_has_everything(cluster: FakeJobs) -> None:
    found = findings()
    assert {name: item.found for name, item in found.items() if item.state != "ok"} == {}
    assert "v1.34.4" in found["cluster"].found
    assert found["cluster gpus"].found == "4 of nvidia.com/gpu"


def remove_from_paths(fake: FakeJobs) -> None:
    fake.paths["/apis"]["groups"].clear()


def stop_the_operator(fake: FakeJobs) -> None:
    fake.objects["deployments", "training-operator"]["status"] = {}


@pytest.mark.parametrize(
    ("lack", "name", "found", "advice"),
    [
        (
            lambda fake: fake.remove("namespaces", "hpml"),
            "namespace hpml",
            "there is no",
            "apply -k k8s/base",
        ),
        (
            lambda fake: fake.remove("serviceaccounts", "hpml-stage"),
            "serviceaccount hpml-stage",
            "there is no serviceaccount hpml-stage in the namespace hpml",
            "apply -k k8s/base",
        ),
        (
            lambda fake: fake.remove("serviceaccounts", "hpml-launcher"),
            "serviceaccount hpml-launcher",
            "there is no",
            "for train.nodes > 1",
        ),
        (
            lambda fake: fake.remove("secrets", "hpml-store"),
            "secret hpml-store",
            "there is no",
            "make-secrets",
        ),
        (
            lambda fake: fake.denied.update({("create", "jobs"), ("list", "pods")}),
            "rights",
            "you may not create jobs, list pods",
            "--role=hpml-submitter",
        ),
        (
            remove_from_paths,
            "training",
            "does not know PyTorchJobs",
            "install the Kubeflow training operator",
        ),
        (stop_the_operator, "training", "no training-operator runs", "install"),
        (
            lambda fake: fake.remove("services", "mlflow"),
            "mlflow server",
            "there is no service mlflow",
            "base",
        ),
        (
            lambda fake: fake.remove("secrets", "kubeflow/hpml-store"),
            "pipelines secret",
            "there is no secret hpml-store in the namespace kubeflow",
            "k8s/make-secrets kubeflow",
        ),
        (
            lambda fake: fake.remove("rolebindings", "kubeflow/hpml-launcher"),
            "pipelines launcher",
            "there is no rolebinding hpml-launcher in the namespace kubeflow",
            "k8s/components/kubeflow",
        ),
        (
            lambda fake: fake.objects["configmaps", "kubeflow/kfp-launcher"]["data"].update(
                defaultPipelineRoot="s3://ours/kubeflow"
            ),
            "pipelines store",
            "names s3://ours/kubeflow, and no endpoint and credentials",
            "k8s/components/kubeflow-store",
        ),
        (lambda fake: fake.remove("nodes", "n"), "images", "hpml-cpu:0.1.0", "make images"),
        (
            lambda fake: fake.remove("storageclasses", "fast"),
            "volumes",
            "no default StorageClass",
            "mark one as default",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    cluster: FakeJobs, lack: Any, name: str, found: str, advice: str
) -> None:
    lack(cluster)
    finding = findings()[name]
    assert finding.state == "missing"
    assert found in finding.found
    assert advice in finding.advice


def test_gpus_are_missing_only_if_a_stage_asks_for_them(cluster: FakeJobs) -> None:
    cluster.objects["nodes", "n"]["status"]["allocatable"] = {}
    assert findings()["cluster gpus"].state == "optional"
    asked = findings(stages={"train": {"gpus": 1}})["cluster gpus"]
    assert asked.state == "missing"
    assert "which train ask for" in asked.found


def test_an_image_of_a_registry_is_pulled(cluster: FakeJobs) -> None:
    images = findings(images={"cpu": "registry.example/hpml-cpu:1"})["images"]
    assert images.state == "optional"
    assert "registry.example/hpml-cpu:1" in images.found


def test_what_may_not_be_seen_does_not_hide_the_rest(cluster: FakeJobs) -> None:
    cluster.denied.update({("get", "secrets"), ("get", "serviceaccounts"), ("get", "namespaces")})
    found = findings()
    assert found["secret hpml-store"].state == "optional"
    assert found["namespace hpml"].state == "optional"
    assert found["volumes"].state == "ok"


def test_a_part_that_is_refused_is_one_finding(cluster: FakeJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Finding:
        raise cluster_doctor.Unavailable("not allowed to list nodes of the cluster", fix="ask for it")

    monkeypatch.setattr(cluster_doctor, "_images", refuse)
    found = findings()
    assert found["images"] == Finding(
        "images",
        "optional",
        "cannot be looked at: not allowed to list nodes of the cluster",
        "ask for it",
    )
    assert found["volumes"].state == "ok"


def test_a_tracking_server_elsewhere_is_not_looked_for(cluster: FakeJobs) -> None:
    cluster.remove("services", "mlflow")
    assert findings(tracking_uri="https://mlflow.example.org")["mlflow server"].state == "ok"
    assert findings(tracking_uri="")["mlflow server"].state == "optional"


def test_a_cluster_that_does_not_answer_is_one_finding(cluster: FakeJobs) -> None:
    cluster.outage.set()
    [finding] = cluster_doctor.examine(ClusterConfig())
    assert finding.state == "missing"
    assert "does not answer" in finding.found
    assert "KUBECONFIG" in finding.advice


def test_a_server_that_is_no_cluster_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that accepts connections and answers nonsense."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [
                    {"name": "c", "cluster": {"server": f"http://127.0.0.1:{listener.getsockname()[1]}"}}
                ],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    [finding] = cluster_doctor.examine(ClusterConfig())
    thread.join()
    listener.close()
    assert finding.state == "missing"
    assert "what is not JSON" in finding.found


@pytest.mark.parametrize("text", ["", "{", "[]", "apiVersion: v1\nkind: Config\n"])
def test_a_kubeconfig_that_is_none_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    found = [item for item in doctor.examine(ClusterConfig()) if item.name == "cluster"]
    assert [item.state for item in found] == ["missing"]
    assert "no cluster is configured" in found[0].found


def test_without_a_kubeconfig_a_cluster_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    [finding] = [item for item in doctor.examine(ClusterConfig()) if item.name == "cluster"]
    assert (finding.state, finding.found) == ("optional", "no kubeconfig")


def test_kubeflow_that_keeps_artifacts_in_our_store(cluster: FakeJobs) -> None:
    shipped = yaml.safe_load(Path("k8s/components/kubeflow-store/launcher.yaml").read_text())
    cluster.objects["configmaps", "kubeflow/kfp-launcher"]["data"] = shipped["data"]
    assert findings()["pipelines store"] == Finding(
        "pipelines store", "ok", "artifacts of its runs are in s3://hpml/kubeflow"
    )


def test_without_kubeflow_nothing_is_looked_for_there(cluster: FakeJobs) -> None:
    cluster.remove("services", "ml-pipeline")
    assert not [name for name in findings() if name.startswith("pipelines ")]
