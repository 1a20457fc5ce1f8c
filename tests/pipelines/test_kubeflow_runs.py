"""Runs on Kubeflow, against a small API of this machine: submitted, watched, read, scheduled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Listener
from kubeflow_api import RUN_ID, Api, node, pod_of, run, serving, task_nodes

from components.errors import ExitCode, StageFailed, Unavailable, UsageError
from pipelines import kubeflow, kubeflow_runs, recipe, run_record
from pipelines.execution import first_failure
from pipelines.kubeflow import Compiled, compile_pipeline
from pipelines.kubeflow_runs import find_target, log, refresh, remote_run, schedule, submit, wait
from pipelines.run_record import RunRecord

RECIPE = Path(__file__).parents[1] / "chain_recipe.yaml"
HTML_URI = "minio://mlpipeline/v2/artifacts/chain-recipe/report/0b5c/html"


class Talkative(Listener):
    """A listener that also remembers progress."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: list[tuple[str, int]] = []

    def progressed(self, name: str, event: Any) -> None:
        self.progress.append((name, event["done"]))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_pipeline(recipe.load(RECIPE))


@pytest.fixture(autouse=True)
def _quick(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting, one compilation for all tests, no environment of the user's."""
    monkeypatch.setattr(kubeflow_runs, "_POLL_S", 0.01)
    monkeypatch.setattr(kubeflow, "compile_pipeline", lambda _loaded: compiled)
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
    target = find_target(api.host, in_cluster=False, **chosen)
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
        run("RUNNING", [node("prepare-driver", "RUNNING")]),
        run("RUNNING", [*task_nodes("prepare", "RUNNING")]),
        run("RUNNING", [*task_nodes("prepare", "SUCCEEDED"), *task_nodes("train", "RUNNING")]),
        run("RUNNING", [*task_nodes("prepare", "SUCCEEDED"), *task_nodes("train", "RUNNING")]),
    ]
    all_done = [item for task in _tasks(home, api, listener) for item in task_nodes(task, "SUCCEEDED")]
    api.runs.append(run("SUCCEEDED", all_done))
    api.logs[pod_of("train")] = f"epoch 1\n{progress(1)}{event(event='note', text='waits')}{progress(2)}"
    api.logs[pod_of("report")] = f"writing\n{handed_over(HTML_URI)}"
    api.artifacts[HTML_URI] = b"<!doctype html><title>Report</title>"
    record = run_record.list_runs(home)[0]

    ended = watched(home, record, listener)

    assert (ended.status, ended.exit_code) == ("done", 0)
    assert {step.status for step in ended.steps.values()} == {"done"}
    assert ended.steps["prepare"].seconds == 5.0
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


def _tasks(home: Path, api: Api, listener: Listener) -> list[str]:
    """Submits, and returns the names of the tasks."""
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    return list(remote.tasks.values())


def test_what_kubeflow_took_from_its_cache(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    cached = [node("prepare-driver", "SUCCEEDED"), node("prepare", "SUCCEEDED")]
    api.runs = [run("RUNNING", [*cached, *task_nodes("train", "RUNNING")])]
    remote = remote_run(home, record.id)
    assert remote
    steps = refresh(home, record, remote).steps
    assert (steps["prepare"].status, steps["train"].status) == ("cached", "running")


@pytest.mark.parametrize(
    "code", [ExitCode.CONFIG_INVALID, ExitCode.STAGE_FAILED, ExitCode.GATE_FAILED, ExitCode.UNAVAILABLE]
)
def test_a_step_that_failed_has_its_own_words_and_code(
    api: Api, home: Path, listener: Talkative, code: ExitCode
) -> None:
    """Kubeflow shows 1, whatever it was."""
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [*task_nodes("prepare", "SUCCEEDED"), *task_nodes("train", "FAILED")])]
    said = "the loss is not finite -> lower learning_rate"
    api.logs[pod_of("train")] = progress(1) + event(event="failed", message=said, exit_code=int(code))
    ended = watched(home, record, listener)
    failure = first_failure(ended)
    assert failure and failure[0] == "train"
    assert (failure[1].error, failure[1].exit_code) == (said, code)
    assert (ended.status, ended.exit_code) == ("failed", code)
    assert ended.steps["deploy"].status == "blocked"
    assert ("train", "failed") in listener.changes


@pytest.mark.parametrize("log", [None, "Killed\n", event(event="failed", message="?", exit_code=99)])
def test_a_step_that_failed_without_a_word(
    api: Api, home: Path, listener: Talkative, log: str | None
) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [*task_nodes("prepare", "FAILED")])]
    if log is not None:
        api.logs[pod_of("prepare")] = log
    step = watched(home, record, listener).steps["prepare"]
    assert step.exit_code == ExitCode.STAGE_FAILED
    assert ("perhaps for lack of memory" in step.error) is (log is None or "Killed" in log)


def test_a_driver_that_failed_is_a_step_that_failed(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("FAILED", [node("prepare-driver", "FAILED")])]
    step = watched(home, record, listener).steps["prepare"]
    assert step.status == "failed" and "or never started" in step.error


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
    api.runs = [run("CANCELED", [*task_nodes("prepare", "SUCCEEDED"), *task_nodes("train", "CANCELED")])]
    ended = watched(home, record, listener)
    assert (ended.status, ended.exit_code) == ("interrupted", ExitCode.TERMINATED)
    assert {ended.steps[name].status for name in ("train", "deploy")} == {"interrupted"}


def test_an_outage_is_waited_for_and_told_once(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", [])]
    outages = iter([1, 2, 3])

    def answer() -> tuple[int, Any]:
        return (503, {"message": "away"}) if next(outages, None) else (200, api.runs[0])

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
    assert {asked.split()[0] for asked in api.asked[-2:]} == {"GET", "POST"}  # nothing was stopped


def test_logs_that_may_not_be_read_do_not_end_the_watching(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    nodes = task_nodes("prepare", "RUNNING")
    api.runs = [run("RUNNING", nodes), run("RUNNING", nodes), run("SUCCEEDED", [])]
    api.overrides["GET /apis/v1alpha1"] = (403, {"error_message": "jo may not read logs"})
    assert watched(home, record, listener).status == "done"
    assert len([text for text in listener.said if "jo may not read logs" in text]) == 1


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (None, "the log of the step is not there to tell"),
        ("ExecutorOutput: {cut", "the log of the step is not there to tell"),
        (handed_over("gs://elsewhere/html"), "refused fetching an artifact"),
    ],
)
def test_a_report_that_cannot_be_fetched_is_said_to_be_on_the_page(
    api: Api, home: Path, listener: Talkative, log: str | None, why: str
) -> None:
    record = submitted(home, api, listener)
    api.runs = [run("SUCCEEDED", task_nodes("report", "SUCCEEDED"))]
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
    api.runs = [run("RUNNING", task_nodes("train", "RUNNING"))]
    api.logs[pod_of("train")] = f"epoch 1\n{progress(1)}epoch 2\n"
    assert log(remote, "train") == "epoch 1\nepoch 2\n"
    with pytest.raises(UsageError, match=r"has no log of step prepare.*look at http"):
        log(remote, "prepare")


def test_a_run_that_is_over_is_not_asked_for_again(api: Api, home: Path, listener: Talkative) -> None:
    record = submitted(home, api, listener)
    remote = remote_run(home, record.id)
    assert remote
    api.runs = [run("SUCCEEDED", [])]
    record = refresh(home, record, remote)
    asked = len(api.asked)
    assert refresh(home, record, remote).status == "done" and len(api.asked) == asked


def test_a_run_of_this_machine_is_not_remote(home: Path) -> None:
    assert remote_run(home, "quickstart-20261121-114502-3f9a") is None


# ------------------------------------------------------------------------------------------------- scheduling


def test_a_schedule(api: Api, listener: Listener) -> None:
    target = find_target(api.host, in_cluster=False, experiment="", namespace="")
    assert schedule(recipe.load(RECIPE), target, "0 3 * * 1-5", listener) == "every-night"
    path, body = api.bodies[-1]
    assert path == "/apis/v2beta1/recurringruns"
    assert body["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1-5"}}
    assert (body["mode"], body["max_concurrency"], body["no_catchup"]) == ("ENABLE", "1", True)
    assert "Kubeflow's cron begins with the seconds: 0 0 3 * * 1-5" in listener.said


def test_a_schedule_that_is_none_is_refused_before_anything_is_asked(api: Api, listener: Listener) -> None:
    target = find_target(api.host, in_cluster=False, experiment="", namespace="")
    with pytest.raises(UsageError, match="is no hour"):
        schedule(recipe.load(RECIPE), target, "0 25 * * *", listener)
    assert api.asked == []
