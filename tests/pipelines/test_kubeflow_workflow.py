"""Which pods belong to a task, from the nodes that Kubeflow's API shows of an Argo workflow."""

from __future__ import annotations

import pytest
from kubeflow_api import node, node_id

from pipelines.kubeflow_server import Run
from pipelines.kubeflow_workflow import Workflow, _fnv1a, seconds, started_at_s


def workflow(*nodes: dict[str, object]) -> Workflow:
    return Workflow.of(Run.model_validate({"run_details": {"task_details": nodes}}))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("test-workflow-with-retry-strategy8h899[0].Execute.Python2Compile(0)", 961031240),
        ("test-workflow-with-retry-strategy8h899[0].Execute.DependencyTesting", 3783705931),
        ("exit-handler-with-param-96rrj.step-1", 588897729),
    ],
)
def test_nodes_are_numbered_as_argo_does(name: str, number: int) -> None:
    """Names and ids of nodes in workflows that Argo ran, from its own tests."""
    assert _fnv1a(name) == number


def test_a_task_that_is_not_retried() -> None:
    executor = node_id("wf", "wf.root.train.executor")
    found = workflow(node("train", "RUNNING", executor), node("prepare", "SUCCEEDED", "wf-1"))
    assert found.pods("train")[0] == executor.replace("wf-", "wf-system-container-impl-")
    assert found.pods("prepare") == []


def test_attempts_are_newest_first_and_only_those_that_were_made() -> None:
    first = node_id("wf", "wf(0).root(0).train(0).executor(0)")
    second = node_id("wf", "wf(0).root(0).train(1).executor(0)")
    found = workflow(
        node("wf(0)", "RUNNING"),
        node("root(0)", "RUNNING"),
        node("train", "RUNNING"),
        node("train(0)", "FAILED"),
        node("train(1)", "RUNNING"),
        node("executor", "FAILED", first),
        node("executor(0)", "FAILED"),
        node("executor", "RUNNING", second),
    )
    pods = [name for name in found.pods("train") if "metadata" not in name]
    assert pods == [name.replace("wf-", "wf-system-container-impl-") for name in (second, first)]


def test_a_cached_task_has_no_pod() -> None:
    """Its executor is skipped, so there is no attempt at it, while another task has one."""
    skipped = node_id("wf", "wf(0).root(0).prepare(0).executor")
    found = workflow(
        node("wf(0)", "RUNNING"),
        node("root(0)", "RUNNING"),
        node("prepare(0)", "SUCCEEDED", skipped),
        node("executor(0)", "RUNNING"),
    )
    assert found.pods("prepare") == []


def test_times_that_are_not_known_are_zero() -> None:
    (task,) = Run.model_validate(
        {
            "run_details": {
                "task_details": [{"start_time": "2026-11-21T10:00:00Z", "end_time": "1970-01-01T00:00:00Z"}]
            }
        }
    ).tasks
    assert started_at_s(task) == 1795255200.0
    assert seconds(task) == 0.0
