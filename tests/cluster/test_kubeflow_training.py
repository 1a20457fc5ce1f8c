"""The train step of `hpml submit` with two nodes: its launcher, in Kubeflow's namespace, and real workers.

Role and secret are those of `k8s/components/kubeflow` and `k8s/make-secrets kubeflow`. Kubeflow itself is not
there: what its launcher does around a step is a few lines here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hpml.io import storage
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import PODS, Namespace, connect
from hpml.pipelines.cluster.config import StageNeeds
from tests.cluster.access import ROOT, Workspace, kubectl, run_script, wait_until
from tests.cluster.test_pytorchjob import Training, store, weights, weights_of_local_run

__all__ = ["store", "weights_of_local_run"]  # fixtures

# Fetches the input to the disk of its pod, runs the step, uploads what it wrote.
AROUND = """
import pathlib, subprocess, sys
from hpml.io import storage
storage.fetch(sys.argv[1], pathlib.Path("/tmp/minio/data"))
code = subprocess.run(sys.argv[3:]).returncode
if not code:
    storage.upload(pathlib.Path("/tmp/minio/out"), sys.argv[2])
sys.exit(code)
"""
EXECUTOR_INPUT = {
    "inputs": {"artifacts": {"prepare": {"artifacts": [{"uri": "/tmp/minio/data"}]}}},
    "outputs": {
        "artifacts": {"out": {"artifacts": [{"uri": "/tmp/minio/out"}]}},
        "outputFile": "/tmp/kfp/outputs.json",
    },
}


@pytest.fixture
def kubeflow(workspace: Workspace) -> Iterator[Namespace]:
    """Kubeflow's namespace, where the training operator may be already, set up as docs/cluster.md says."""
    launcher = str(ROOT / "k8s" / "components" / "kubeflow" / "launcher")
    kubectl("create", "namespace", "kubeflow", check=False)
    try:
        kubectl("-n", "kubeflow", "create", "serviceaccount", "pipeline-runner")
        kubectl("apply", "-k", launcher)
        run_script(ROOT / "k8s" / "make-secrets", "kubeflow")
        yield connect("kubeflow")
    finally:
        kubectl("delete", "-k", launcher, "--ignore-not-found", check=False)
        for made in ("pod/quickstart-impl-1", "serviceaccount/pipeline-runner", "secret/hpml-store"):
            kubectl("-n", "kubeflow", "delete", made, "--ignore-not-found", check=False)


def test_two_nodes_train_what_two_processes_train(
    kubeflow: Namespace, store: str, weights_of_local_run: str
) -> None:
    training = Training("hpml", store, "as-kubeflow")
    settings = training.settings
    launcher = [
        "python",
        "-m",
        "hpml.pipelines.operators.pytorchjob",
        "--cluster",
        settings.model_dump_json(),
    ]
    step = ["train", "--config", json.dumps(training.config), "--names", '{"data": "prepare"}']
    step += ["--scratch", training.scratch, "--threads", "1", "--executor-input", json.dumps(EXECUTOR_INPUT)]
    template: dict[str, Any] = pods.pod_template(
        settings,
        StageNeeds(cpus=0.2, memory="512Mi", image="client"),
        ["python", "-c", AROUND, f"{store}/data", training.out, *launcher, *step],
        labels=pods.labels(training.name, "train"),
        env=pods.environment(settings, training.name, "test", "train"),
        account="pipeline-runner",
    )
    own_name = {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    template["spec"]["containers"][0]["env"].append(own_name)
    template["metadata"]["name"] = "quickstart-impl-1"
    kubeflow.create(PODS, {"apiVersion": "v1", "kind": "Pod", **template})

    def ended() -> str:
        found = kubeflow.get(PODS, "quickstart-impl-1") or {"status": {}}
        phase = str(found["status"].get("phase"))
        return phase if phase in ("Succeeded", "Failed") else ""

    phase = wait_until(ended, "the step has ended", seconds=300)
    said = kubectl("-n", "kubeflow", "logs", "quickstart-impl-1")
    assert phase == "Succeeded", said
    assert "made in the namespace kubeflow, as pipeline-runner" in said
    assert weights(training.out) == weights_of_local_run
    assert storage.list_names(f"{settings.store}/handover/{training.name}") == []
