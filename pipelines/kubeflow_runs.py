"""Runs of a pipeline on Kubeflow: starting them, by hand or by the clock, and what becomes of them.

A run that was submitted from here has a folder in the workspace like any other: `run.json` is what was last
heard of it, `remote.json` says where it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components import storage
from components.artifacts import write_text_atomic
from components.contract import Config
from components.errors import ExitCode, HpmlError, StageFailed, Unavailable, UsageError
from components.executor_input import HTML
from components.relay import EVENT_PREFIX, read_event
from pipelines import graph, kubeflow_cron, results, run_record
from pipelines.kubeflow_server import Server, find_server
from pipelines.kubeflow_workflow import Workflow, seconds, started_at_s
from pipelines.place import Watcher
from pipelines.plan import trace
from pipelines.recipe import LoadedRecipe
from pipelines.run_record import FINISHED, RunRecord, Status, StepRecord

_POLL_S = 3.0
_PATIENCE_S = 120.0  # with a server that no longer answers; the run does not need us
_ENDED: Mapping[str, Status] = {"SUCCEEDED": "done", "FAILED": "failed", "CANCELED": "interrupted"}
_NOT_STARTED = ("", "RUNTIME_STATE_UNSPECIFIED", "PENDING")
_LAUNCHERS_WORDS = "ExecutorOutput: "  # of KFP's launcher, before what a step has handed over


@dataclass(frozen=True)
class Target:
    """Where pipelines are submitted to. namespace: of one user of a Kubeflow that has many."""

    server: Server
    in_cluster: bool = False
    experiment: str = ""  # the recipe's name if empty
    namespace: str = ""


def find_target(host: str, *, in_cluster: bool, experiment: str, namespace: str) -> Target:
    """Raises UsageError or Unavailable, see `find_server`."""
    return Target(find_server(host, in_cluster=in_cluster), in_cluster, experiment, namespace)


class RemoteRun(Config):
    """Where a run is in Kubeflow: its id and its page there, and what each step is called."""

    host: str
    in_cluster: bool
    namespace: str
    run_id: str
    page: str
    tasks: dict[str, str]

    def server(self) -> Server:
        """The server that has it. Raises UsageError or Unavailable, see `find_server`."""
        return find_server("" if self.in_cluster else self.host, in_cluster=self.in_cluster)


def remote_run(home: Path, run: str) -> RemoteRun | None:
    """Where the run `run` of this workspace is in Kubeflow; None if it ran elsewhere."""
    try:
        return RemoteRun.model_validate_json((home / run / "remote.json").read_text())
    except FileNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------- starting


def submit(home: Path, loaded: LoadedRecipe, target: Target, watcher: Watcher) -> RunRecord:
    """Start a run of a recipe; returns its record, with every step waiting.

    Raises ConfigInvalid if it cannot be compiled, Unavailable if Kubeflow does not take it.
    """
    request, tasks = _request(loaded, target, watcher)
    name = run_record.new_run_id(loaded.recipe.name)
    run_id = target.server.create_run({"display_name": name, **request})
    remote = RemoteRun(
        host=target.server.host,
        in_cluster=target.in_cluster,
        namespace=target.namespace,
        run_id=run_id,
        page=target.server.page(run_id),
        tasks=tasks,
    )
    watcher.say(f"{name} runs in Kubeflow: {remote.page}")
    plan = trace(graph.graph, loaded.recipe)
    record = run_record.start(home, name, loaded.recipe.name, str(loaded.file), plan)
    record = record.model_copy(update={"executor_pid": 0})  # no process of this machine
    write_text_atomic(home / name / "remote.json", remote.model_dump_json(indent=1))
    results.store_recipe(home, record, loaded)
    run_record.save(home, record)
    return record


def schedule(loaded: LoadedRecipe, target: Target, cron: str, watcher: Watcher) -> str:
    """Have Kubeflow run a recipe by the clock, one run at a time; returns the id of the schedule.

    Raises UsageError if `cron` is no cron expression, and what `submit` raises.
    """
    fields = kubeflow_cron.fields(cron)
    if len(fields) == 5:
        fields = ["0", *fields]
        watcher.say(f"Kubeflow's cron begins with the seconds: {' '.join(fields)}")
    request, _ = _request(loaded, target, watcher)
    body = {
        "display_name": loaded.recipe.name,
        **request,
        "trigger": {"cron_schedule": {"cron": " ".join(fields)}},
        "mode": "ENABLE",
        "max_concurrency": "1",
        "no_catchup": True,  # after an outage one run is wanted, not one for each that was missed
    }
    return target.server.create_recurring_run(body)


def _request(loaded: LoadedRecipe, target: Target, watcher: Watcher) -> tuple[dict[str, Any], dict[str, str]]:
    """What a run and a schedule have in common, and the names of the tasks."""
    from pipelines.kubeflow import compile_pipeline

    compiled = compile_pipeline(loaded)
    _check_namespace(target)
    name = target.experiment or loaded.recipe.name
    experiment, is_new = target.server.experiment(name, target.namespace)
    if is_new:
        watcher.say(f"the experiment {name} is new")
    spec, platform = yaml.safe_load_all(compiled.text)
    request = {
        "experiment_id": experiment,
        "pipeline_spec": {"pipeline_spec": spec, "platform_spec": platform},
        "runtime_config": {},
    }
    return request, dict(compiled.tasks)


def _check_namespace(target: Target) -> None:
    has_users = target.server.check()
    if has_users and not target.namespace:
        raise Unavailable(
            f"Kubeflow at {target.server.host} has many users",
            why="a run belongs into the namespace of one of them",
            fix="name yours: --namespace",
        )
    if target.namespace and not has_users:
        raise Unavailable(
            f"Kubeflow at {target.server.host} has no namespaces of users",
            why="everything runs in the one that Kubeflow is installed in",
            fix="leave --namespace out",
        )


# ------------------------------------------------------------------------------------------------- watching


def refresh(home: Path, record: RunRecord, remote: RemoteRun) -> RunRecord:
    """The record of a run as it is now. Raises Unavailable."""
    return record if record.status != "running" else _Observer(home, record, remote).look()


def wait(home: Path, record: RunRecord, remote: RemoteRun, watcher: Watcher) -> RunRecord:
    """Show a run until it is over, and fetch its report; returns its record.

    Raises StageFailed if the run failed and none of its steps did, Unavailable if Kubeflow stays away. The
    run goes on without us.
    """
    observer = _Observer(home, record, remote, watcher)
    away_since_s: float | None = None
    try:
        while True:
            try:
                if observer.look().status != "running":
                    break
                away_since_s = None
            except Unavailable as error:
                if away_since_s is None:
                    away_since_s = time.monotonic()
                    watcher.say(f"{error}; asking again, for {_PATIENCE_S:.0f} s")
                if time.monotonic() - away_since_s >= _PATIENCE_S:
                    raise
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, Unavailable):
        watcher.say(f"the run goes on: hpml status {record.id}, or {remote.page}")
        raise
    record = observer.record
    fetch_report(home, record, remote, watcher)
    if record.status == "failed" and not any(step.status == "failed" for step in record.steps.values()):
        raise StageFailed("the run failed, and none of its steps did", why=observer.error, fix=remote.page)
    return record


class _Observer:
    """Asks Kubeflow for a run, remembers what it heard, and tells a watcher what has changed."""

    def __init__(
        self, home: Path, record: RunRecord, remote: RemoteRun, watcher: Watcher | None = None
    ) -> None:
        self.record = record
        self.error = ""  # what Kubeflow says about the run as a whole
        self._home, self._remote, self._watcher = home, remote, watcher
        self._server = remote.server()
        self._told: dict[str, int] = {}  # how many events of a step
        self._said_no_logs = False

    def look(self) -> RunRecord:
        """Ask once. Raises Unavailable."""
        run = self._server.run(self._remote.run_id)
        self.error = run.error.message if run.error else ""
        ended = _ENDED.get(run.state)
        workflow = Workflow.of(run)
        for step, task in self._remote.tasks.items():
            self._update(step, workflow, task, ended)
        if ended:
            code = _exit_code(ended, self.record.steps.values())
            took_s = time.time() - self.record.started_at_s
            self.record = self.record.model_copy(
                update={"status": ended, "seconds": took_s, "exit_code": int(code)}
            )
        run_record.save(self._home, self.record)
        return self.record

    def _update(self, step: str, workflow: Workflow, task: str, ended: Status | None) -> None:
        old = self.record.steps[step]
        new = old.model_copy(update=_seen(workflow, task, ended))
        if new.status == "failed" and old.status != "failed":
            new = new.model_copy(update=self._failure(workflow, task))
        self.record = self.record.model_copy(update={"steps": {**self.record.steps, step: new}})
        if self._watcher and new.status != old.status:
            self._watcher.step_changed(step, new)
        if self._watcher and new.status == "running":
            events = self._events(workflow, task)
            for event in events[self._told.get(step, 0) :]:
                if event["event"] == "progress":
                    self._watcher.progressed(step, event)
                elif event["event"] == "note":
                    self._watcher.say(f"{step}: {event['text']}")
            self._told[step] = len(events)

    def _events(self, workflow: Workflow, task: str) -> list[dict[str, Any]]:
        """What a step has told so far, by its log."""
        try:
            text = _log(self._server, self._remote.run_id, workflow.pods(task)) or ""
            return [event for line in text.splitlines() if (event := read_event(line))]
        except Unavailable as error:
            if self._watcher and not self._said_no_logs:
                self._watcher.say(f"what happens inside of steps cannot be shown: {error}")
            self._said_no_logs = True
            return []

    def _failure(self, workflow: Workflow, task: str) -> dict[str, Any]:
        """Why a step failed, in its own words: Kubeflow tells no reason, and shows every exit code as 1."""
        for event in reversed(self._events(workflow, task)):
            if event["event"] == "failed":
                code = event["exit_code"]
                known = code if code in list(ExitCode) and code else ExitCode.STAGE_FAILED
                return {"error": event["message"], "exit_code": int(known)}
        error = "its pod said nothing: it was killed, perhaps for lack of memory, or never started"
        return {"error": f"{error} -> look at {self._remote.page}", "exit_code": int(ExitCode.STAGE_FAILED)}


def _exit_code(ended: Status, steps: Iterable[StepRecord]) -> int:
    """That of a run: of its first step that failed, if it failed."""
    if ended == "interrupted":
        return ExitCode.TERMINATED
    failed = [step.exit_code for step in steps if step.status == "failed"]
    return failed[0] if failed else ExitCode.STAGE_FAILED if ended == "failed" else ExitCode.DONE


def _seen(workflow: Workflow, task: str, ended: Status | None) -> dict[str, Any]:
    """What the nodes of a workflow say about a step, as fields of a StepRecord; `ended`: how the run did."""
    node, driver = workflow.nodes.get(task), workflow.nodes.get(f"{task}-driver")  # which starts the step
    status: Status = "waiting"
    if node and node.state == "SUCCEEDED":
        status = "done" if workflow.pods(task) else "cached"
    elif (node and node.state == "FAILED") or (driver and driver.state == "FAILED"):
        status = "failed"
    elif ended:
        status = "interrupted" if ended == "interrupted" else "blocked"
    elif (node and node.state not in _NOT_STARTED) or (driver and driver.state not in _NOT_STARTED):
        status = "running"
    known = node or driver
    times = {"started_at_s": started_at_s(known), "seconds": seconds(known)} if known else {}
    return {"status": status, **times}


# ----------------------------------------------------------------------------------------------------- logs


def log(remote: RemoteRun, step: str) -> str:
    """What a step has printed, without its events.

    Raises UsageError that says where to look if Kubeflow has no log of it, Unavailable.
    """
    text = _step_log(remote, step)
    if text is None:
        raise UsageError(
            f"Kubeflow has no log of step {step}",
            why="it has not started, was taken from the cache, or its pod is gone",
            fix=f"look at {remote.page}",
        )
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(EVENT_PREFIX))


def _step_log(remote: RemoteRun, step: str) -> str | None:
    server = remote.server()
    pods = Workflow.of(server.run(remote.run_id)).pods(remote.tasks[step])
    return _log(server, remote.run_id, pods)


def _log(server: Server, run_id: str, pods: list[str]) -> str | None:
    """The log of the first of `pods` that has one."""
    return next((text for pod in pods if (text := server.log(run_id, pod)) is not None), None)


# --------------------------------------------------------------------------------------------------- report


def fetch_report(home: Path, record: RunRecord, remote: RemoteRun, watcher: Watcher) -> None:
    """Bring the report into the folder of the run; where that cannot be done, say why and where it is."""
    step = next((name for name, step in record.steps.items() if _has_report(step)), None)
    if step is None:
        return
    try:
        page = _report(remote, step)
    except HpmlError as error:
        watcher.say(f"the report was not fetched, it is on the run's page: {error}")
        return
    file = home / record.id / "report" / "report.html"
    file.parent.mkdir(exist_ok=True)
    write_text_atomic(file, page)
    watcher.say(f"report: {file.resolve()}")


def _has_report(step: StepRecord) -> bool:
    return step.stage == "report" and step.status in FINISHED


def _report(remote: RemoteRun, step: str) -> str:
    uri = _uri_in(_step_log(remote, step) or "", HTML)
    if uri is None:
        raise Unavailable("Kubeflow does not say where it is", why="the log of the step is not there to tell")
    if uri.startswith("s3://"):
        return storage.read_text(uri)
    return remote.server().artifact(uri, remote.namespace).decode(errors="replace")


def _uri_in(text: str, output: str) -> str | None:
    """The URI of an output of a step, from what KFP's launcher logs when the step is done."""
    _, found, told = text.rpartition(_LAUNCHERS_WORDS)
    try:
        handed_over, _ = json.JSONDecoder().raw_decode(told if found else "")
        return str(handed_over["artifacts"][output]["artifacts"][0]["uri"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None
