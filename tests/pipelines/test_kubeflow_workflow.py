"""What the nodes of an Argo workflow say of tasks: newest attempts, pods and their names, packed nodes."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest
from kubeflow_api import WORKFLOW, cached_nodes, driver_node, node, pod_of, run, task_nodes

from hpml.core.errors import Unavailable
from hpml.pipelines.kubeflow import workflow as kubeflow_workflow
from hpml.pipelines.kubeflow.workflow import Workflow


def workflow(*nodes: dict[str, Any]) -> Workflow:
    return Workflow.of(run("RUNNING", list(nodes)).manifest())


def test_pods_are_called_as_argo_calls_them() -> None:
    """By the workflow, the template and the number in the node's id."""
    told = {
        "metadata": {"name": "hello-world-9tql2"},
        "status": {
            "nodes": {
                "hello-world-9tql2-961031240": {
                    "id": "hello-world-9tql2-961031240",
                    "name": "hello-world-9tql2.root.train.executor",
                    "type": "Pod",
                    "templateName": "system-container-impl",
                    "phase": "Running",
                }
            }
        },
    }
    found = Workflow.of(json.dumps(told))
    (pod,) = found.pods("train")
    assert found.pod_name(pod) == "hello-world-9tql2-system-container-impl-961031240"


def test_attempts_are_newest_first_and_only_those_that_were_made() -> None:
    found = workflow(
        node("root(0).train", "Running", "Retry"),
        node("root(0).train(0)", "Failed"),
        node("root(0).train(10).executor(0)", "Running", "Pod"),
        node("root(0).train(9)", "Failed"),
        node("root(0).train(0).executor(1)", "Failed", "Pod"),
        node("root(0).train(0).executor(0)", "Failed", "Pod"),
        node("root(0).train-2(0).executor(0)", "Failed", "Pod"),
    )
    assert [pod.name.removeprefix(f"{WORKFLOW}(0).root(0).") for pod in found.pods("train")] == [
        "train(10).executor(0)",
        "train(0).executor(1)",
        "train(0).executor(0)",
    ]
    step = found.step("train")
    assert step and step.phase == "Running"  # not that of its first attempt


def test_a_level_that_was_tried_again_counts() -> None:
    found = workflow(
        node("root(0).train", "Failed", "Retry"),
        node("root(1).train", "Succeeded", "Retry"),
        node("root(0).train(0)", "Failed"),
    )
    step = found.step("train")
    assert step and step.phase == "Succeeded"


def test_a_task_that_is_not_retried() -> None:
    found = workflow(node("root.train", "Succeeded"), node("root.train.executor", "Succeeded", "Pod"))
    step = found.step("train")
    assert step and step.seconds == 5.0 and step.started_at_s == 1795255210.0
    assert not found.is_cached("train") and len(found.pods("train")) == 1


def test_a_cached_task_has_no_pod_but_what_has_none_is_not_therefore_cached() -> None:
    found = workflow(*cached_nodes("prepare"), node("root(0).train", "Succeeded", "Retry"))
    assert found.is_cached("prepare") and found.pods("prepare") == []
    assert not found.is_cached("train") and not found.is_cached("benchmark")


def test_a_driver_has_a_pod_of_its_own() -> None:
    found = workflow(*driver_node("train", "Failed"))
    (pod,) = found.pods("train-driver")
    driver = found.driver("train")
    assert driver and driver.has_failed and found.step("train") is None
    assert found.pod_name(pod) == pod_of("train-driver")


def test_packed_nodes_are_read_like_others() -> None:
    nodes = [item for name in ("prepare", "train") for item in task_nodes(name, "Succeeded", padding=1 << 20)]
    state = run("SUCCEEDED", nodes)
    assert "compressedNodes" in state.manifest()
    assert [pod.phase for pod in Workflow.of(state.manifest()).pods("train")] == ["Succeeded"]


def packed(data: bytes) -> str:
    return json.dumps({"status": {"compressedNodes": base64.b64encode(data).decode()}})


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        '{"status": {"nodes": ["train"]}}',
        '{"status": {"nodes": {"a": {"startedAt": "tomorrow"}}}}',
        '{"status": {"compressedNodes": "%%%"}}',
        packed(b"no gzip"),
        packed(gzip.compress(b"{}" * 100, mtime=0)[:-12]),
        packed(gzip.compress(b"[1, 2", mtime=0)),
        packed(gzip.compress(b" " * 2000, mtime=0)),
    ],
)
def test_what_cannot_be_read_is_told(manifest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow_workflow, "_MAX_BYTES", 1000)
    with pytest.raises(Unavailable, match="in another way"):
        Workflow.of(manifest)


def test_nodes_that_argo_keeps_elsewhere_are_told() -> None:
    with pytest.raises(Unavailable, match="in a database of its own"):
        Workflow.of('{"status": {"offloadNodeStatusVersion": "fnv:1"}}')


def test_a_run_that_has_not_started_has_no_nodes() -> None:
    assert Workflow.of("").nodes == ()
