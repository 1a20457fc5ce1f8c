"""Runs on Kubeflow, against a small API of this machine: submitted, watched, read, scheduled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import Listener
from kubeflow_api import RUN_ID, Api, cached_nodes, driver_node, node, pod_of, run, serving, task_nodes

from hpml.core.errors import ExitCode, StageFailed, Unavailable, UsageError
from hpml.io import tracking
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main
from hpml.pipelines.commands.kubeflow import end_of_remote_run
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import first_failure
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.kubeflow import compile as kubeflow
from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs
from hpml.pipelines.kubeflow.remote_runs import Target, log, refresh, remote_run, schedule, submit, wait
from tests.compiling import compiled

RECIPE = Path(__file__).parents[1] / "chain_recipe.yaml"
HTML_URI = "minio://mlpipeline/v2/artifacts/chain-recipe/report/0b5c/html"


class Talkative(Listener):
    """A listener that also remembers progress."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: list[tuple[str, int]] = []

    def progressed(self, name: str, event: Any) -> None:
        self.progress.append((name, event["done"]))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting, one compilation for all tests, no environment of the user's, no MLflow of the cluster."""
    monkeypatch.setattr(kubeflow_runs, "end_tracking", lambda *_given: None)
    monkeypatch.setattr(kubeflow_runs, "_POLL_S", 0.01)
    ready = compiled(RECIPE)
    monkeypatch.setattr(kubeflow, "compile_pipeline", lambda _loaded: ready)
    for name in ("KF_PIPELINES_ENDPOINT", "KFP_EXISTING_TOKEN", "KF_PIPELINES_UI_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(Api(experiments={"chain_recipe": "experiment-1"})) as api:
        yield api


@pytest.fixture
def listener() -> Talkative:
    return Talkative()


def submitted(home: Path, api: Api, listener: Listener, **given: str) -> RunRecord:
    chosen = {"experiment": "", "namespace": "", **given}
    target = Target(api.host, **chosen)
    return submit(home, recipe.load(RECIPE), target, listener)


def watched(home: Path, record: RunRecord, listener: Listener) -> RunRecord:
    remote = remote_run(home, record.id)
    assert remote
    return wait(home, record, remote, listener)


def event(**fields: Any) -> str:
    return f"#hpml {json.dumps({'time_s': 1.0, **fields})}\n"


def progress(done: int) -> str:
    return event(event="progress", done=done, total=4, unit="epochs", note="")


def handed_over(uri: str) -> str:
    """What KFP's launcher logs when a step is done."""
    told = {"artifacts": {"html": {"artifacts": [{"name": "html", "uri": uri, "metadata": {}}]}}}
    line = f"I1121 10:00:15.000000 1 launcher_v2.go:705] ExecutorOutput: {json.dumps(told, indent=2)}"
    return f"{line}\nI1121 10:00:15.000001 1 launcher_v2.go:151] publish success.\n"


# ------------------------------------------------------------------------------------------------- submitting


def test_what_is_sent(api: Api, home: Path, listener: Listener) -> None:
    record = submitted(home, api, listener)
    (path, body), *rest = api.bodies
    assert (path, rest) == ("/apis/v2beta1/runs", [])
    assert body["display_name"] == record.id
    assert body["experiment_id"] == "experiment-1"
    spec = body["pipeline_spec"]
    assert set(spec) == {"pipeline_spec", "platform_spec"}
    assert "train" in spec["pipeline_spec"]["root"]["dag"]["tasks"]
    assert "kubernetes" in spec["platform_spec"]["platforms"]
    assert f"{api.host}/#/runs/details/{RUN_ID}" in listener.said[-1]


def test_what_is_remembered(api: Api, home: Path, listener: Listener) -> None:
    record = submitted(home, api, listener)
    assert run_record.load(home, record.id) == record
    assert (record.status, record.executor_pid) == ("running", 0)
    assert {step.status for step in record.steps.values()} == {"waiting"}
    remote = remote_run(home, record.id)
    assert remote and (remote.run_id, remote.host) == (RUN_ID, api.host)
    assert set(remote.tasks) == set(record.steps)
    assert (home / record.id / "recipe.yaml").is_file()


def test_no_token_is_remembered(
    api: Api, home: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "hunter2")
    record = submitted(home, api, listener)
    assert not [file for file in (home / record.id).iterdir() if "hunter2" in file.read_text()]


def test_an_experiment_that_is_new_is_made_and_told(api: Api, home: Path, listener: Listener) -> None:
    submitted(home, api, listener, experiment="tuesdays")
    assert "the experiment tuesdays is new" in listener.said
    assert api.bodies[-1][1]["experiment_id"] == "experiment-new"


def test_namespaces_are_for_a_kubeflow_with_users(api: Api, home: Path, listener: Listener) -> None:
    with pytest.raises(Unavailable, match=r"has no namespaces of users.*leave --namespace out"):
        submitted(home, api, listener, namespace="team-a")
    api.multi_user = True
    with pytest.raises(Unavailable, match=r"has many users.*name yours: --namespace"):
        submitted(home, api, listener)
    record = submitted(home, api, listener, namespace="team-a", experiment="new")
    assert ("/apis/v2beta1/experiments", {"display_name": "new", "namespace": "team-a"}) in api.bodies
    remote = remote_run(home, record.id)
    assert remote and remote.namespace == "team-a"


def test_a_run_that_was_not_taken_leaves_nothing_behind(api: Api, home: Path, listener: Listener) -> None:
    api.overrides["POST /apis/v2beta1/runs"] = (500, {"message": "no"})
    with pytest.raises(Unavailable):
        submitted(home, api, listener)
    assert not home.exists() or not list(home.iterdir())


# --------------------------------------------------------------------------------------------------- watching


def test_a_run_from_its_start_to_its_report(api: Api, home: Path, listener: Talkative) -> None:
    api.runs = [
        run("PENDING", []),
        run("RUNNING", driver_node("prepare", "Running")),
        run("RUNNING", [*task_nodes("prepare", "Running")]),
        run("RUNNING", [*task_nodes("prepare", "Succeeded"), *task_nodes("train", "Running")]),
        run("RUNNING", [*task_nodes("prepare", "Succeeded"), *task_nodes("train", "Running")]),
    ]
    all_done = [item for task in _tasks(home, api, listener) for item in task_nodes(task, "Succeeded")]
    api.runs.append(run("SUCCEEDED", all_done))
    api.logs[pod_of("train")] = f"epoch 1\n{progress(1)}{event(event='note', text='waits')}{progress(2)}"
    api.logs[pod_of("report")] = f"writing\n{handed_over(HTML_URI)}"
    api.artifacts[HTML_URI] = b"<!doctype html><title>Report</title>"
    record = run_record.list_runs(home)[0]

    ended = watched(home, record, listener)

    assert (ended.status, ended.exit_code) == ("done", 0)
    assert {step.status for step in ended.steps.values()} == {"done"}
    assert ended.steps["prepare"].seconds == 5.0
    assert ended.seconds == 60.0  # as Kubeflow tells it, whenever it is asked
    assert run_record.load(home, record.id) == ended
    assert [change for change in listener.changes if change[0] in ("prepare", "train")] == [
        ("prepare", "running"),
        ("prepare", "done"),
        ("train", "running"),
        ("train", "done"),
    ]
    assert listener.progress == [("train", 1), ("train", 2)]  # each once
    assert listener.said.count("train: waits") == 1
    report = home / record.id / "report" / "report.html"
    assert report.read_text() == "<!doctype html><title>Report</title>"
    assert listener.said[-1] == f"report: {report.resolve()}"


def test_an_incomplete_measurement_is_said_once_with_what_completes_it(
    api: Api, home: Path, listener: Talkative, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = _tasks(home, api, listener)
    api.runs = [
        run("RUNNING", task_nodes("benchmark", "Succeeded")),
        run("RUNNING", task_nodes("benchmark", "Succeeded")),
        run("SUCCEEDED", [item for task in tasks for item in task_nodes(task, "Succeeded")]),
    ]
    told = event(event="finished", digest="d", metrics={}, incomplete="machine busy")
    api.logs[pod_of("benchmark")] = f"measuring\n{told}"
    ended = watched(home, run_record.list_runs(home)[0], listener)
    assert (ended.status, ended.exit_code) == ("done", 0)
    lacking = {name: step.incomplete for name, step in ended.steps.items() if step.incomplete}
    assert lacking == {"benchmark": "machine busy"}
    assert listener.said.count("benchmark is incomplete; what is missing is told when the run ends") == 1
    end_of_remote_run(ended, completed_by="hpml submit it")
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "warning: benchmark is incomplete: machine busy",
        "to complete it: hpml submit it",
    ]


def _tasks(home: Path, api: Api, listener: Listener) -> list[str]:
    """Submits, and returns the names of the tasks."""
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    return list(remote.tasks.values())


def test_what_kubeflow_took_from_its_cache(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("RUNNING", [*cached_nodes("prepare"), *task_nodes("train", "Running")])]
    remote = remote_run(home, record.id)
    assert remote
    steps = refresh(home, record, remote, listener).steps
    assert (steps["prepare"].status, steps["train"].status) == ("cached", "running")


@pytest.mark.parametrize(
    "code", [ExitCode.CONFIG_INVALID, ExitCode.STAGE_FAILED, ExitCode.GATE_FAILED, ExitCode.UNAVAILABLE]
)
def test_a_step_that_failed_has_its_own_words_and_code(
    api: Api, home: Path, listener: Talkative, code: ExitCode
) -> None:
    """Kubeflow shows 1, whatever it was."""
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [*task_nodes("prepare", "Succeeded"), *task_nodes("train", "Failed")])]
    said = "the loss is not finite -> lower learning_rate"
    api.logs[pod_of("train")] = progress(1) + event(event="failed", message=said, exit_code=int(code))
    ended = watched(home, record, listener)
    failure = first_failure(ended)
    assert failure and failure[0] == "train"
    assert (failure[1].error, failure[1].exit_code) == (said, code)
    assert (ended.status, ended.exit_code) == ("failed", code)
    assert ended.steps["bundle"].status == "blocked"
    assert ("train", "failed") in listener.changes


@pytest.mark.parametrize("log", [None, "Killed\n", event(event="failed", message="?", exit_code=99)])
def test_a_step_that_failed_without_a_word(
    api: Api, home: Path, listener: Talkative, log: str | None
) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [*task_nodes("prepare", "Failed")])]
    if log is not None:
        api.logs[pod_of("prepare")] = log
    step = watched(home, record, listener).steps["prepare"]
    assert step.exit_code == ExitCode.STAGE_FAILED
    assert ("perhaps for lack of memory" in step.error) is (log is None or "Killed" in log)


@pytest.mark.parametrize(
    ("failing", "status", "code"),
    [("peaks", "done", ExitCode.DONE), ("select", "failed", ExitCode.STAGE_FAILED)],
)
def test_a_step_that_only_shows_fails_no_run(
    api: Api, home: Path, listener: Talkative, failing: str, status: str, code: int
) -> None:
    record = submitted(home, api, listener)
    phases = {name: "Failed" if name == failing else "Succeeded" for name in record.steps}
    for blocked in ("diagnose", "report"):
        phases.pop(blocked)
    api.runs = [run("FAILED", [node for name in phases for node in task_nodes(name, phases[name])])]
    seen = watched(home, record, listener)
    assert (seen.steps[failing].status, seen.status, seen.exit_code) == ("failed", status, code)


def test_a_driver_that_failed_is_a_step_that_failed(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", driver_node("prepare", "Failed", "main: Error (exit code 1)"))]
    api.logs[pod_of("prepare-driver")] = (
        "I1121 starting\nF1121 KFP driver: failed to lookup existing execution\n"
    )
    step = watched(home, record, listener).steps["prepare"]
    assert step.status == "failed"
    assert "its driver failed: F1121 KFP driver: failed to lookup existing execution" in step.error


def test_a_run_that_failed_before_its_steps(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [], error="failed to create a workflow: quota")]
    with pytest.raises(
        StageFailed, match="none of its steps did: failed to create a workflow: quota -> http"
    ):
        watched(home, record, listener)
    remembered = run_record.load(home, record.id)
    assert (remembered.status, remembered.exit_code) == ("failed", ExitCode.STAGE_FAILED)


def test_a_run_that_was_stopped(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    nodes = [*task_nodes("prepare", "Succeeded"), *task_nodes("train", "Failed", "stopped with 'Terminate'")]
    api.runs = [run("FAILED", nodes, history=("PENDING", "RUNNING", "CANCELING"))]
    ended = watched(home, record, listener)
    assert (ended.status, ended.exit_code) == ("interrupted", ExitCode.TERMINATED)
    assert {ended.steps[name].status for name in ("train", "bundle")} == {"interrupted"}


def test_a_run_of_more_nodes_than_argo_keeps_unpacked(api: Api, home: Path, listener: Talkative) -> None:
    """What the API makes of nodes stays as it was then: a run that succeeded would have blocked steps."""
    tasks = _tasks(home, api, listener)
    half = len(tasks) // 2
    api.runs = [
        run("RUNNING", [item for task in tasks[:half] for item in task_nodes(task, "Running")]),
        run("SUCCEEDED", [item for task in tasks for item in task_nodes(task, "Succeeded", padding=200_000)]),
    ]
    api.logs[pod_of("report")] = handed_over(HTML_URI)
    api.artifacts[HTML_URI] = b"<!doctype html><title>Report</title>"
    record = run_record.list_runs(home)[0]
    ended = watched(home, record, listener)
    assert {step.status for step in ended.steps.values()} == {"done"}
    assert (home / record.id / "report" / "report.html").exists()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ('ImagePullBackOff: Back-off pulling image "x:1"', "cannot get the image.*x:1.*check cluster.images"),
        (
            "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu. preemption: none",
            "no node has room.*cpu",
        ),
        ('CreateContainerConfigError: secret "hpml-store" not found', "hpml-store.*k8s/make-secrets"),
    ],
)
def test_a_pod_that_waits_is_shown_with_its_cause(
    api: Api, home: Path, listener: Talkative, message: str, why: str
) -> None:
    record = submitted(home, api, listener)
    waits = run("RUNNING", [*task_nodes("prepare", "Pending", message)])
    api.runs = [waits, waits, run("RUNNING", task_nodes("prepare", "Running")), run("SUCCEEDED", [])]
    remote = remote_run(home, record.id)
    assert remote
    step = refresh(home, record, remote, listener).steps["prepare"]
    assert step.status == "waiting" and re.search(why, step.error)
    watched(home, record, listener)
    assert len([text for text in listener.said if re.search(f"prepare waits: .*{why}", text)]) == 1
    assert run_record.load(home, record.id).steps["prepare"].error == ""


def test_a_pod_that_is_on_its_way_is_running(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("RUNNING", task_nodes("prepare", "Pending", "ContainerCreating"))]
    remote = remote_run(home, record.id)
    assert remote and refresh(home, record, remote, listener).steps["prepare"].status == "running"


def test_what_kubeflow_says_of_a_pod_that_said_nothing(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", task_nodes("train", "Failed", "OOMKilled (exit code 137)"))]
    assert "OOMKilled (exit code 137)" in watched(home, record, listener).steps["train"].error


def test_steps_that_are_not_found_among_the_nodes_are_not_cached(
    api: Api, home: Path, listener: Talkative
) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", [node("root(0).another", "Succeeded")])]
    assert {step.status for step in watched(home, record, listener).steps.values()} == {"done"}


@pytest.mark.parametrize("serves", ["ui", "api"])
def test_logs_come_through_either_address(
    api: Api, home: Path, listener: Talkative, serves: Literal["ui", "api"]
) -> None:
    api.serves = serves
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    api.runs = [run("RUNNING", task_nodes("train", "Running"))]
    api.logs[pod_of("train")] = "epoch 1\n"
    assert "".join(log(remote, "train")) == "epoch 1\n"
    with pytest.raises(UsageError, match="has no log of step prepare"):
        list(log(remote, "prepare"))


def test_the_address_of_the_api_gives_no_report_but_s3_does(
    api: Api, home: Path, listener: Talkative, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.serves = "api"
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", task_nodes("report", "Succeeded"))]
    api.logs[pod_of("report")] = handed_over(HTML_URI)
    ended = watched(home, record, listener)
    assert (
        "it is the address of Kubeflow's API" in listener.said[-1] and "ml-pipeline-ui" in listener.said[-1]
    )

    api.logs[pod_of("report")] = handed_over("s3://hpml/kubeflow/report/html")
    monkeypatch.setattr(kubeflow_runs.storage, "read_text", lambda uri: f"the page at {uri}")
    remote = remote_run(home, record.id)
    assert remote
    refresh(home, ended, remote, listener)
    page = home / record.id / "report" / "report.html"
    assert page.read_text() == "the page at s3://hpml/kubeflow/report/html"


def test_a_report_is_fetched_later_through_another_address(api: Api, home: Path, listener: Talkative) -> None:
    """Nobody has to wait, or to have the port forwarded that was forwarded then."""
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", task_nodes("report", "Succeeded"))]
    api.logs[pod_of("report")] = handed_over(HTML_URI)
    api.artifacts[HTML_URI] = b"the report"
    file = home / record.id / "remote.json"
    file.write_text(file.read_text().replace(api.host, "http://127.0.0.1:9"))
    remote = remote_run(home, record.id, api.host)
    assert remote
    refresh(home, record, remote, listener)
    assert (home / record.id / "report" / "report.html").read_text() == "the report"
    asked = len(api.asked)
    refresh(home, run_record.load(home, record.id), remote, listener)
    assert len(api.asked) == asked  # once


def test_mlflow_is_told_of_a_run_whose_driver_failed(
    api: Api, home: Path, listener: Talkative, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kubeflow, "compile_pipeline", lambda _loaded: compiled(RECIPE))
    record = submitted(home, api, listener)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    api.runs = [run("FAILED", driver_node("prepare", "Failed"))]
    ended = watched(home, record, listener)
    [told] = [json.loads(line) for line in (home / record.id / "tracking.jsonl").read_text().splitlines()]
    assert (told["run"], told["name"], told["step"]) == (RUN_ID, "chain_recipe", "")
    assert (told["event"], told["status"]) == ("ended", "FAILED")
    assert "MLflow was not told that the run ended" in listener.said[-1]

    sent: list[str] = []
    drained = tracking.Drained(0)
    monkeypatch.setattr(tracking, "drain", lambda _file, uri: sent.append(uri) or drained)
    remote = remote_run(home, record.id)
    assert remote
    refresh(home, ended, remote, listener)  # the next command tries again
    assert sent == ["http://127.0.0.1:9"]


def test_an_outage_is_waited_for_and_told_once(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", [])]
    outages = iter([1, 2, 3])

    def answer() -> tuple[int, Any]:
        return (503, {"message": "away"}) if next(outages, None) else (200, api.runs[0].told)

    api.overrides[f"GET /apis/v2beta1/runs/{RUN_ID}"] = answer
    assert watched(home, record, listener).status == "done"
    assert len([text for text in listener.said if "asking again" in text]) == 1


def test_an_outage_that_lasts_ends_the_watching_and_not_the_run(
    api: Api, home: Path, listener: Talkative, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow_runs, "_PATIENCE_S", 0.05)
    record = submitted(home, api, listener)
    api.overrides[f"GET /apis/v2beta1/runs/{RUN_ID}"] = (503, {"message": "away"})
    with pytest.raises(Unavailable, match="HTTP 503, away"):
        watched(home, record, listener)
    assert listener.said[-1].startswith(f"the run goes on: hpml status {record.id}")
    assert run_record.load(home, record.id).status == "running"


def test_ctrl_c_ends_the_watching_and_not_the_run(
    api: Api, home: Path, listener: Talkative, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    record = submitted(home, api, listener)
    api.runs = [run("RUNNING", [])]
    monkeypatch.setattr(kubeflow_runs.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        watched(home, record, listener)
    assert listener.said[-1].startswith("the run goes on")
    assert len([asked for asked in api.asked if not asked.startswith("GET")]) == 1  # nothing was stopped


def test_logs_that_may_not_be_read_do_not_end_the_watching(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    nodes = task_nodes("prepare", "Running")
    api.runs = [run("RUNNING", nodes), run("RUNNING", nodes), run("SUCCEEDED", [])]
    api.overrides["GET /k8s/pod/logs"] = (403, {"error_message": "jo may not read logs"})
    assert watched(home, record, listener).status == "done"
    assert len([text for text in listener.said if "jo may not read logs" in text]) == 1


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (None, "the log of the step is not there to tell"),
        ("ExecutorOutput: {cut", "the log of the step is not there to tell"),
        (handed_over("gs://elsewhere/html"), "refused fetching an artifact"),
        ('{"error_message": "Failed to get logs"}', "the log of the step is not there to tell"),
    ],
)
def test_a_report_that_cannot_be_fetched_is_said_to_be_on_the_page(
    api: Api, home: Path, listener: Talkative, log: str | None, why: str
) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", task_nodes("report", "Succeeded"))]
    api.overrides["GET /artifacts"] = (500, b"no such provider")
    if log is not None:
        api.logs[pod_of("report")] = log
    assert watched(home, record, listener).status == "done"
    assert "it is on the run's page" in listener.said[-1] and why in listener.said[-1]


# ----------------------------------------------------------------------------------------------- logs, status


def test_the_log_of_a_step_is_without_its_events(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    api.runs = [run("RUNNING", task_nodes("train", "Running"))]
    api.logs[pod_of("train")] = f"epoch 1\n{progress(1)}epoch 2\n"
    assert "".join(log(remote, "train")) == "epoch 1\nepoch 2\n"
    with pytest.raises(UsageError, match=r"has no log of step prepare.*look at http"):
        list(log(remote, "prepare"))


def test_a_log_is_followed_until_its_step_has_ended(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    going, done = task_nodes("train", "Running"), task_nodes("train", "Succeeded")
    api.runs = [run("RUNNING", going), run("RUNNING", going), run("RUNNING", done)]
    api.logs[pod_of("train")] = "epoch 1\n"
    pieces = []
    for piece in log(remote, "train", follow=True):
        pieces.append(piece)
        api.logs[pod_of("train")] += f"{progress(1)}epoch {len(pieces) + 1}\n"
    assert pieces[:2] == ["epoch 1\n", "epoch 2\n"] and len(pieces) >= 3
    assert api.runs[0].nodes[-1]["phase"] == "Succeeded"


def test_the_traceback_of_a_failure_comes_after_the_log(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    api.runs = [run("FAILED", task_nodes("train", "Failed"))]
    failed = event(event="failed", message="no", exit_code=4, traceback="Traceback: ...\n")
    api.logs[pod_of("train")] = f"epoch 1\n{failed}"
    assert "".join(log(remote, "train")) == "epoch 1\n"
    assert "".join(log(remote, "train", traceback=True)) == "epoch 1\nTraceback: ...\n"


def test_a_submitted_run_is_the_latest(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    assert run_record.load(home, "latest") == record


def test_the_commands_know_a_run_that_was_only_submitted(
    api: Api, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hpml(*arguments: str) -> str:
        main([*arguments, "--home", str(home), "--host", api.host])
        return capsys.readouterr().out

    run_id = hpml("submit", str(RECIPE)).strip()
    failed = event(event="failed", message="no", exit_code=4, traceback="Traceback: ...\n")
    api.runs = [run("SUCCEEDED", [*task_nodes("train", "Succeeded"), *task_nodes("report", "Succeeded")])]
    api.logs = {
        pod_of("train"): f"epoch 1\n{failed}",
        pod_of("report"): handed_over(HTML_URI),
    }
    assert hpml("logs", "train", "--follow", "--traceback") == "epoch 1\nTraceback: ...\n"
    assert not (home / run_id / "report").exists()
    api.artifacts[HTML_URI] = b"the report"
    page = Path(hpml("report").strip())
    assert page == (home / run_id / "report" / "report.html").resolve() and page.read_text() == "the report"
    told = json.loads(hpml("status", "-o", "json"))
    assert (told["id"], told["status"], told["seconds"]) == (run_id, "done", 60.0)


def test_a_recipe_of_which_nothing_can_be_built_is_not_submitted(
    api: Api,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpml.pipelines.preflight.applicability.ask", lambda *_, **__: ["prune cannot"])
    file = tmp_path / "vit.yaml"
    file.write_text("data: digits\ntrain: {model: vit}\nvariants: {pruned: [prune]}\n")
    with pytest.raises(SystemExit) as ended:
        main(["submit", str(file), "--home", str(home), "--host", api.host])
    assert ended.value.code == ExitCode.CONFIG_INVALID
    assert "none of the recipe's variants can be built: prune cannot" in capsys.readouterr().err
    assert not home.exists()


def test_a_run_that_was_stopped_ends_submit_with_143(
    api: Api, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.runs = [run("FAILED", [], history=("RUNNING", "CANCELING"))]
    with pytest.raises(SystemExit) as ended:
        main(["submit", str(RECIPE), "--home", str(home), "--host", api.host, "--wait"])
    assert ended.value.code == ExitCode.TERMINATED == 143
    assert "the run was stopped in Kubeflow" in capsys.readouterr().err


def test_a_run_that_is_over_is_not_asked_for_again(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    api.runs = [run("FAILED", [])]
    record = refresh(home, record, remote, listener)
    asked = len(api.asked)
    assert refresh(home, record, remote, listener).status == "failed" and len(api.asked) == asked


def test_a_run_of_this_machine_is_not_remote(home: Path) -> None:
    assert remote_run(home, "quickstart-20261121-114502-3f9a01b2") is None


# ------------------------------------------------------------------------------------------------- scheduling


def test_a_schedule(api: Api, listener: Listener) -> None:
    target = Target(api.host)
    assert schedule(recipe.load(RECIPE), target, "0 3 * * 1-5", listener) == "every-night"
    path, body = api.bodies[-1]
    assert path == "/apis/v2beta1/recurringruns"
    assert body["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1-5"}}
    assert (body["mode"], body["max_concurrency"], body["no_catchup"]) == ("ENABLE", "1", True)
    assert "Kubeflow's cron begins with the seconds: 0 0 3 * * 1-5" in listener.said


def test_a_schedule_that_is_none_is_refused_before_anything_is_asked(api: Api, listener: Listener) -> None:
    target = Target(api.host)
    with pytest.raises(UsageError, match="is no hour"):
        schedule(recipe.load(RECIPE), target, "0 25 * * *", listener)
    assert api.asked == []
