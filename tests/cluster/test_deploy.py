"""`hpml deploy --to kubernetes` and `hpml rollback` on the real cluster, with requests all the while."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.delivery.kubernetes import manifests
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig
from tests.cluster.access import (
    NAMESPACE,
    SERVING_IMAGE,
    Workspace,
    kubectl,
    kubectl_json,
    wait_until,
)
from tests.pipelines.delivery.releases import release, sealed_bundle
from tests.pipelines.delivery.test_local import slow_graph
from tests.serving.small_bundles import WEIGHTS, graph

HPML = Path(sys.executable).with_name("hpml")
NAME = "small"
STORE = ClusterConfig().store
KILLS = int(os.environ.get("HPML_TEST_DEPLOY_KILLS", "3"))  # make test-deploy-kills: 20
# A node of the tests has two CPUs for everything, so latencies there say little.
LOOSE = ["--smoke-s", "3", "--p50-factor", "4", "--p99-factor", "100"]
SMALL = ["--cpus", "0.1", "--cpu-limit", "1", "--memory", "384Mi"]
# Its proxies learn late that a pod is gone, and servers that start take the CPUs from those that answer.
SMALL += ["--drain-s", "8", "--max-queue-ms", "10000"]
_LOAD = r"""
import http.client, json, socket, sys, time
body, head = bytes.fromhex(sys.argv[1]), sys.argv[2]
good, told, address = 0, time.monotonic(), ""
while not address:  # of the Service, once: the node's one DNS server is not what is tried
    try:
        address = socket.gethostbyname("small")
    except OSError:
        time.sleep(1)
while True:
    for attempt in (1, 2):
        connection = http.client.HTTPConnection(address, 8000, timeout=10)
        try:
            headers = {"Inference-Header-Content-Length": head}
            connection.request("POST", "/v2/models/small/infer", body, headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            good += 1
            break
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}", "attempt": attempt}), flush=True)
        finally:
            connection.close()
    if time.monotonic() - told > 1:
        print(json.dumps({"good": good}), flush=True)
        told = time.monotonic()
    time.sleep(0.01)
"""


@dataclass
class Load:
    """A pod that asks the Service, a connection for each request, again where that failed.

    said: all that it said, once it is gone.
    """

    name: str
    said: str = ""

    def told(self) -> list[dict[str, Any]]:
        said = self.said or kubectl("-n", NAMESPACE, "logs", self.name)
        return [json.loads(line) for line in said.splitlines()]

    def good(self) -> int:
        return max((line["good"] for line in self.told() if "good" in line), default=0)

    def failed(self) -> list[dict[str, Any]]:
        return [line for line in self.told() if "failed" in line]


@contextmanager
def load() -> Iterator[Load]:
    """Requests while entered; some have been answered by then."""
    import numpy as np

    from tests.serving.small_bundles import as_request

    body, headers = as_request(np.zeros((1, 1, 4, 4), np.float32), binary=True)
    name = f"small-load-{random.randrange(10**6)}"
    arguments = ["-c", _LOAD, body.hex(), headers["Inference-Header-Content-Length"]]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "load",
                    "image": SERVING_IMAGE,
                    "command": ["python", *arguments],
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "64Mi"},
                        "limits": {"cpu": "500m", "memory": "128Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    try:
        found = Load(name)
        wait_until(lambda: _is_started(name) and found.good() > 10, "requests are answered")
        yield found
        before = found.good()
        wait_until(lambda: found.good() > before + 10, "requests are answered still")
        found.said = kubectl("-n", NAMESPACE, "logs", name)
    finally:
        kubectl("-n", NAMESPACE, "delete", "pod", name, "--grace-period=0", "--force", check=False)


def _is_started(pod: str) -> bool:
    return kubectl_json("-n", NAMESPACE, "get", "pod", pod)["status"]["phase"] == "Running"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("bundles")
    return {
        "first": sealed_bundle(place / "first", version=1),
        "second": sealed_bundle(place / "second", version=2),
        "slow": sealed_bundle(place / "slow", version=3, model=slow_graph()),
        "perturbed": sealed_bundle(place / "perturbed", version=4, model=graph(WEIGHTS + 0.1)),
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy") / "runs"


@pytest.fixture(scope="module")
def registry(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Versions 1 to 4 of the model, in the registry of the namespace."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=workspace.mlflow)
    client.create_registered_model(NAME)
    for _ in range(4):
        client.create_model_version(NAME, source=f"{STORE}/nothing")
    yield client
    client.delete_registered_model(NAME)


@pytest.fixture(scope="module")
def run(workspace: Workspace, registry: Any, home: Path) -> Iterator[Run]:
    """`run("deploy", bundle)`, `run("rollback")` in the namespace of the tests; all is gone in the end."""

    def go(verb: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(home, verb, *arguments),
            env={**told(workspace), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    yield go
    kinds = "deployments,services,jobs,poddisruptionbudgets,networkpolicies,horizontalpodautoscalers"
    for suffix in ("", "-smoke"):
        chosen = f"app.kubernetes.io/name={NAME}{suffix}"
        kubectl("-n", NAMESPACE, "delete", kinds, "-l", chosen, check=False)


def told(workspace: Workspace) -> dict[str, str]:
    return {**os.environ, **workspace.environment, "MLFLOW_TRACKING_URI": workspace.mlflow}


def command(home: Path, verb: str, *arguments: str) -> list[str]:
    where = ["--to", "kubernetes", "--namespace", NAMESPACE, "--home", str(home)]
    if verb == "rollback":
        return [str(HPML), verb, NAME, *where, *arguments]
    return [str(HPML), verb, *arguments, "--name", NAME, *where, "--image", SERVING_IMAGE, *SMALL, *LOOSE]


def served() -> str:
    """The version that takes the traffic."""
    found = kubectl_json("-n", NAMESPACE, "get", "deployment", NAME)
    return str(json.loads(found["metadata"]["annotations"][manifests.RELEASE])["model_version"])


def pods(track: str) -> list[str]:
    chosen = f"app.kubernetes.io/name={NAME},{manifests.TRACK_LABEL}={track}"
    found = kubectl_json("-n", NAMESPACE, "get", "pods", "-l", chosen)["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]


@pytest.fixture
def first(run: Run, bundles: dict[str, Path]) -> None:
    """Version 1 is served, by two pods."""
    answer = run("deploy", str(bundles["first"]))
    assert answer.returncode == 0, answer.stderr
    assert served() == "1" and len(pods("stable")) == 2


def test_a_canary_is_promoted_and_the_release_before_comes_back_without_a_request_that_fails(
    run: Run, first: None, bundles: dict[str, Path], registry: Any, home: Path, tmp_path: Path
) -> None:
    recorded = tmp_path / "requests.jsonl"
    recorded.write_text("".join(f"{one}\n" for one in _recorded(5)))
    with load() as requests:
        answer = run("deploy", str(bundles["second"]), "--replay", str(recorded), "--replay-agreement", "1")
        assert answer.returncode == 0, answer.stderr
        assert "1 of 3 pods" in answer.stderr
        assert served() == "2" and not pods("canary")
        assert registry.get_model_version_by_alias(NAME, "champion").version == "2"
        answer = run("rollback")
        assert answer.returncode == 0, answer.stderr
        assert served() == "1"
    assert not requests.failed()
    champion = registry.get_model_version_by_alias(NAME, "champion")
    assert champion.version == "1"
    noted = json.loads(champion.tags[f"hpml.deployment.kubernetes/{NAMESPACE}/{NAME}"])
    assert noted["outcome"] == "rolled back" and noted["who"] and noted["when"]
    kept = [json.loads(file.read_text()) for file in sorted((home / "deployments" / NAME).glob("*.json"))]
    assert [(one["outcome"], one["release"]["model_version"]) for one in kept[-3:]] == [
        ("promoted", "1"),
        ("promoted", "2"),
        ("rolled back", "1"),
    ]
    replayed = kept[-2]["figures"]["replay"]
    assert (replayed["sent"], replayed["agreement"], replayed["failures"]) == (5, 1.0, [])


def _recorded(count: int) -> Iterator[str]:
    """Requests, as `hpml serve --record` keeps them."""
    import numpy as np

    from tests.serving.small_bundles import as_request

    chance = np.random.default_rng(0)
    for _ in range(count):
        yield as_request(chance.standard_normal((1, 1, 4, 4)).astype(np.float32))[0].decode()


@pytest.mark.parametrize(
    ("canary", "why"),
    [
        ("perturbed", "does not reproduce its golden outputs"),
        ("slow", "times the stable version's"),
        ("crashing", "is damaged"),
    ],
)
def test_a_canary_that_does_not_pass_costs_no_request(
    run: Run, first: None, bundles: dict[str, Path], canary: str, why: str, workspace: Workspace
) -> None:
    bundle = bundles["second" if canary == "crashing" else canary]
    if canary == "crashing":
        _damage(bundle, workspace)
    try:
        with load() as requests:
            answer = run("deploy", str(bundle))
            assert answer.returncode == 5, answer.stderr
            assert why in answer.stderr and "small/1" in answer.stderr
            assert served() == "1" and not pods("canary")
        assert not requests.failed()
    finally:  # so that it is uploaded again
        _store(workspace).delete_object(Bucket="hpml", Key=_key(bundle))


def _store(workspace: Workspace) -> Any:
    import boto3

    secrets = {name.lower(): value for name, value in workspace.environment.items() if "KEY" in name}
    return boto3.client("s3", endpoint_url=workspace.store_endpoint, region_name="us-east-1", **secrets)


def _key(bundle: Path, file: str = "manifest.json") -> str:
    digest = json.loads((bundle / "manifest.json").read_text())["digest"]
    return f"bundles/{digest}/{file}"


def _damage(bundle: Path, workspace: Workspace) -> None:
    """Have it in the store already, but for a byte of its graph."""
    store = _store(workspace)
    for file in (one for one in bundle.rglob("*") if one.is_file()):
        name = file.relative_to(bundle).as_posix()
        content = file.read_bytes()
        body = bytes([content[0] ^ 1]) + content[1:] if name == "engine/model.onnx" else content
        store.put_object(Bucket="hpml", Key=_key(bundle, name), Body=body)


def test_of_a_killed_pod_only_what_was_in_flight_fails_and_succeeds_again(first: None) -> None:
    with load() as requests:
        kubectl("-n", NAMESPACE, "delete", "pod", pods("stable")[0], "--grace-period=0", "--force")
        wait_until(lambda: len(pods("stable")) == 2 and _all_ready(), "another pod is ready")
    failed = requests.failed()
    assert all(one["attempt"] == 1 for one in failed), failed


def _all_ready() -> bool:
    status = kubectl_json("-n", NAMESPACE, "get", "deployment", NAME)["status"]
    return bool(status.get("readyReplicas") == 2 and not status.get("unavailableReplicas"))


def test_an_evicted_pod_costs_no_request_and_the_second_has_to_wait(first: None) -> None:
    with load() as requests:
        one, other = pods("stable")
        _evict(one)
        refused = subprocess.run(
            [
                "kubectl",
                "create",
                "--raw",
                f"/api/v1/namespaces/{NAMESPACE}/pods/{other}/eviction",
                "-f",
                "-",
            ],
            input=_eviction(other),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "disruption budget" in refused.stderr
        wait_until(_all_ready, "another pod is ready")
    assert not requests.failed()


def _eviction(pod: str) -> str:
    return json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}})


def _evict(pod: str) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=_eviction(pod))


@pytest.mark.timeout(max(600, 180 * KILLS))
def test_killed_at_random_moments_a_second_call_finishes_or_undoes(
    run: Run, first: None, bundles: dict[str, Path], workspace: Workspace, home: Path
) -> None:
    current = "first"
    with load() as requests:
        for _ in range(KILLS):
            wanted = "second" if current == "first" else "first"
            process = subprocess.Popen(
                command(home, "deploy", str(bundles[wanted])), env=told(workspace), stderr=subprocess.DEVNULL
            )
            time.sleep(random.uniform(2, 25))
            process.send_signal(signal.SIGKILL)
            process.wait()
            answer = run("deploy", str(bundles[wanted]))
            assert answer.returncode == 0, answer.stderr
            assert served() == {"first": "1", "second": "2"}[wanted] and not pods("canary")
            current = wanted
    assert not requests.failed()


def test_two_deployers_at_once_one_is_named_to_the_other(
    run: Run, first: None, bundles: dict[str, Path], workspace: Workspace, home: Path
) -> None:
    process = subprocess.Popen(
        command(home, "deploy", str(bundles["second"])), env=told(workspace), stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: pods("canary") or served() == "2", "the first is under way")
        answer = run("deploy", str(bundles["first"]), "--wait-s", "0")
        assert answer.returncode == 6, answer.stderr
        assert "another rollout is under way, by" in answer.stderr
    finally:
        assert process.wait(timeout=180) == 0
    assert served() == "2"


def test_what_is_not_shown_here_has_the_schema_of_the_cluster(workspace: Workspace) -> None:
    """One node without metrics and without a network plugin that knows policies: asked, and not run."""
    config = KubernetesConfig(
        name="schema",
        image=SERVING_IMAGE,
        max_replicas=5,
        ingress_host="small.example",
        ingress_class="nginx",
        ingress_tls_secret="small-tls",
        ingress_annotations={"example.org/name": "value"},
        store_cidrs=("10.1.2.0/24",),
        token_secret="token",
        gpus=1,
    )
    documents = [body for _, body in manifests.common(config, release("a" * 12))]
    documents += [manifests.deployment(config, release("a" * 12), "stable")]
    documents += [
        manifests.smoke_job(config, release("a" * 12), name="schema-smoke", seconds=1, beside_stable=True)
    ]
    assert {"HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Ingress"} <= {
        one["kind"] for one in documents
    }
    bodies = {"apiVersion": "v1", "kind": "List", "items": documents}
    kubectl(
        "-n", NAMESPACE, "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(bodies)
    )
