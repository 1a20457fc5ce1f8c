"""The manifests in a real cluster: rights, what admission refuses, MLflow as its users meet it."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.config import ClusterConfig
from tests.cluster.access import (
    CPU_IMAGE,
    NAMESPACE,
    Workspace,
    forwarded,
    kubectl,
    kubectl_json,
    wait_until,
)
from tests.k8s.pod_security import PRIVILEGES, Pod

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "k8s" / "overlays" / "test"
RIGHTS = yaml.safe_load((ROOT / "tests" / "k8s" / "golden" / "rights.yaml").read_text())
ACCOUNTS = [name.removeprefix("hpml/") for name in RIGHTS if name.startswith("hpml/")]

Rights = dict[str, list[str]]


def rights(account: str) -> tuple[Rights, set[str]]:
    """resource -> verbs of a service account, and the URLs it may read, as the API server answers."""
    who = f"system:serviceaccount:{NAMESPACE}:{account}"
    table = kubectl("-n", NAMESPACE, "auth", "can-i", "--list", "--no-headers", f"--as={who}")
    resources: Rights = {}
    urls = set()
    for line in table.splitlines():
        found = re.fullmatch(r"(\S*)\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]\s*", line)
        assert found, line
        resource, url, names, verbs = found.groups()
        assert not names, f"{account} has rights on {resource} {names}, which the golden list cannot say"
        if resource:
            resources.setdefault(resource, []).extend(verbs.split())
        else:
            assert verbs == "get"
            urls.add(url)
    return {resource: sorted(verbs) for resource, verbs in resources.items()}, urls


def test_an_account_without_a_role_may_only_ask_who_it_is(workspace: Workspace) -> None:
    everyone, _ = rights("nobody-in-particular")

    assert everyone
    for resource, verbs in everyone.items():
        assert re.fullmatch(r"selfsubject\w*reviews\.\w+\.k8s\.io", resource)
        assert verbs == ["create"]


@pytest.mark.parametrize("account", ACCOUNTS)
def test_the_rights_are_the_golden_ones(workspace: Workspace, account: str) -> None:
    everyone, public_urls = rights("nobody-in-particular")
    resources, urls = rights(account)

    assert {name: verbs for name, verbs in resources.items() if name not in everyone} == RIGHTS[
        f"hpml/{account}"
    ]
    assert urls == public_urls


def test_one_account_may_not_act_as_another(workspace: Workspace) -> None:
    for verb, what in (
        ("impersonate", "serviceaccounts"),
        ("create", "serviceaccounts/token"),
        ("get", "secrets"),
    ):
        for account in ACCOUNTS:
            who = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
            assert kubectl("-n", NAMESPACE, "auth", "can-i", verb, what, who, check=False).strip() == "no"


# ---------------------------------------------------------------- admission


def submit(pod: Pod) -> subprocess.CompletedProcess[str]:
    """What admission says to a pod; none is made."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "step", "namespace": NAMESPACE},
        "spec": pod,
    }
    return subprocess.run(
        ["kubectl", "create", "--dry-run=server", "-f", "-"],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=False,
    )


def step_pod() -> Pod:
    cluster = ClusterConfig(images={"cpu": CPU_IMAGE})
    needs = cluster.needs("train")
    spec: Pod = pods.pod_template(cluster, needs, ["true"], labels=pods.labels("run", "train"), env={})[
        "spec"
    ]
    return spec


def test_a_pod_of_a_step_is_admitted_without_a_warning(workspace: Workspace) -> None:
    answer = submit(step_pod())

    assert answer.returncode == 0, answer.stderr
    assert "warning" not in answer.stderr.lower()


@pytest.mark.parametrize("privilege", PRIVILEGES)
def test_with_one_more_privilege_it_is_refused(workspace: Workspace, privilege: str) -> None:
    pod = step_pod()
    PRIVILEGES[privilege](pod)

    answer = submit(pod)

    assert answer.returncode != 0
    assert 'violates PodSecurity "restricted' in answer.stderr


def test_a_pod_beyond_the_quota_is_refused(workspace: Workspace) -> None:
    pod = step_pod()
    for amounts in pod["containers"][0]["resources"].values():
        amounts["cpu"] = "1000"

    answer = submit(pod)

    assert answer.returncode != 0
    assert "exceeded quota: hpml" in answer.stderr


def test_a_second_apply_changes_nothing(workspace: Workspace) -> None:
    answer = kubectl("apply", "-k", str(OVERLAY))

    assert answer
    assert [line for line in answer.splitlines() if not line.endswith(" unchanged")] == []


# ---------------------------------------------------------------- MLflow


def mlflow_pod() -> dict[str, Any]:
    (pod,) = kubectl_json("-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=mlflow")["items"]
    found: dict[str, Any] = pod
    return found


def test_mlflow_is_ready_at_its_first_attempt(workspace: Workspace) -> None:
    pod = mlflow_pod()
    (server,) = pod["status"]["containerStatuses"]

    assert server["ready"]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "600Mi"
    assert server["restartCount"] == 0, server["lastState"]


def test_mlflow_answers_to_its_own_names_only(workspace: Workspace) -> None:
    import http.client
    from urllib.parse import urlsplit

    def status(host: str) -> int:
        connection = http.client.HTTPConnection(urlsplit(workspace.mlflow).netloc, timeout=30)
        query = "/api/2.0/mlflow/experiments/search?max_results=1"
        connection.request("GET", query, headers={"Host": host})
        return connection.getresponse().status

    for host in (
        "mlflow:5000",
        "mlflow.hpml:5000",
        "mlflow.hpml.svc.cluster.local:5000",
        "localhost:1234",
        "127.0.0.1:1234",
    ):
        assert status(host) == 200, host
    assert status("rebound.example:5000") == 403


def test_what_mlflow_holds_outlives_its_pod(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, and an artifact that went through the server: this client has no credentials of the store."""
    from mlflow import MlflowClient

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    # Otherwise MLflow sends it to the store with a signed URL, whose host is a name of the cluster.
    monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")
    client = MlflowClient(workspace.mlflow)
    run = client.create_run(client.create_experiment(f"manifests-{secrets.token_hex(4)}"))
    client.log_metric(run.info.run_id, "accuracy_top1", 0.97, step=3)
    client.log_text(run.info.run_id, "kept", "note.txt")
    before = mlflow_pod()["metadata"]["name"]

    kubectl("-n", NAMESPACE, "delete", "pod", before, "--wait=false", "--grace-period=1")

    wait_until(lambda: another_is_ready(before), "another MLflow", seconds=180)
    with forwarded("mlflow", 5000) as url:
        after = MlflowClient(url)
        (point,) = after.get_metric_history(run.info.run_id, "accuracy_top1")
        assert (point.value, point.step) == (0.97, 3)
        assert Path(after.download_artifacts(run.info.run_id, "note.txt")).read_text() == "kept"


def another_is_ready(before: str) -> bool:
    """Whether there is one pod, another than before, and ready: a dying one still gets connections."""
    found = kubectl_json("-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=mlflow")["items"]
    if len(found) != 1 or found[0]["metadata"]["name"] == before:
        return False
    statuses = found[0]["status"].get("containerStatuses", [])
    return bool(statuses) and all(each["ready"] for each in statuses)
