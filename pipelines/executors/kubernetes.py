"""Each step as a Job of a Kubernetes cluster, which does the scheduling; artifacts are in S3.

A run is a ConfigMap that owns its Jobs: whoever deletes it deletes them. The engine does so when the run
is over, except for the Jobs of steps that failed: these stay for `cluster.keep_failed_s`, for a look. An
executor that is killed leaves Jobs that end by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from hpml.components.__main__ import Job, arguments_of
from hpml.core.contract import Events, canonical_json
from hpml.core.errors import ConfigInvalid, ExitCode, HpmlError, Unavailable
from hpml.io import storage
from hpml.io.relay import read_event
from hpml.io.tracking import Outbox, Status
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster import doctor as cluster_doctor
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import JOBS, Json, Say
from hpml.pipelines.cluster.config import StageNeeds
from hpml.pipelines.cluster.store import open_store
from hpml.pipelines.engine import cache_keys
from hpml.pipelines.engine.cache_keys import RuntimeEnvironment
from hpml.pipelines.engine.execution import Settings
from hpml.pipelines.executors.base import StepExit, Watcher
from hpml.pipelines.executors.cluster_job import JobOutcome, JobRunner, RunOwner
from hpml.pipelines.executors.image_contents import require_architecture
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.recipe import LoadedRecipe
from hpml.pipelines.stage_needs import needs_of

_PATIENCE_S = 300.0  # with an API server that is away while steps run
_ABOUT_S = 1800.0  # for an image to say what it holds: its pull, and a node for it, included
_SEEN_WITHIN_S = 60  # how long a Job is kept at least, so that its end is seen
_MLFLOW_STATUS: dict[str, Status] = {"done": "FINISHED", "interrupted": "KILLED"}  # of a run; others: FAILED


class Transcript:
    """What a step prints, parted: its log, and the lines that are events.

    A failure that the step tells is kept in `failure`, until it is known whether it was the reason.
    """

    def __init__(self, log: Path, events: Path) -> None:
        self._log, self._events = log.open("a", buffering=1, encoding="utf-8"), Events(events)
        self.failure: dict[str, Any] | None = None

    def write(self, line: str) -> None:
        """Take note of a line."""
        event = read_event(line)
        if event is None:
            self._log.write(line + "\n")
        elif event["event"] == "failed":
            self.failure = event
        else:
            self._events.write(event.pop("event"), **event)

    def fail(self, message: str, exit_code: int, traceback: str = "") -> None:
        """Tell why the step failed."""
        self._events.write("failed", message=message, exit_code=exit_code, traceback=traceback)


@dataclass
class _Step:
    """A step that has a Job. image: the digest that its key has; is_last: whether the run ends with it."""

    name: str
    job_runner: JobRunner
    transcript: Transcript
    image: str
    is_last: bool
    started_at_s: float = field(default_factory=time.monotonic)


class Jobs:
    """Steps as Jobs, each with a thread that attends to it."""

    cpus = None

    def __init__(self, loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> None:
        self._recipe, self._cluster = loaded.recipe, loaded.recipe.cluster
        self._run, self._say = run, watcher.say
        self.tracks = bool(self._cluster.tracking_uri)
        self._reports = self.tracks and bool(settings.tracking_uri)
        self._kube = kube.connect(self._cluster.namespace, patience_s=_PATIENCE_S, say=self._say)
        self.store = open_store(settings.home, self._cluster, self._say)
        self._runtime_environment: dict[str, RuntimeEnvironment] = {}
        self._owner = RunOwner(self._kube, run, self._recipe.name)
        self._numbers = itertools.count(1)
        self._running: dict[int, _Step] = {}
        self._over: list[tuple[_Step, JobOutcome]] = []
        # Of the kind that a signal handler may put something into at any moment.
        self._ends: queue.SimpleQueue[tuple[int, JobOutcome]] = queue.SimpleQueue()
        self._to_come: set[str] = set()
        self._pending_events: list[tuple[str, Status, float, str]] = []  # name, status, seconds, cause

    # -------------------------------------------------------------------------------- before anything runs

    def check(self, plan: Plan) -> None:
        """Ask the cluster for all that a run needs of it, and the images for what they hold."""
        launches = any(_is_launched(node) for node in plan.nodes.values())
        at_once = kube.connect(self._cluster.namespace, patience_s=0, say=self._say)
        found = cluster_doctor.needed(at_once, self._cluster, launches=launches)
        lacking = [finding for finding in found if finding.state == "missing"]
        for finding in lacking[1:]:
            self._say(f"{finding.found} -> {finding.advice}")
        if lacking:
            raise Unavailable(lacking[0].found, fix=lacking[0].advice)
        for node in plan.nodes.values():
            if needs_of(node.stage).registry and not self._cluster.tracking_uri:
                raise ConfigInvalid(f"{node.name} has no registry", fix="set cluster.tracking_uri")
            for name in ("path", "weights", "tokenizer"):
                path = getattr(node.config, name, None)
                if isinstance(path, Path) and path.exists():
                    self._say(f"{node.name} reads {path}: a pod sees it only if its image has it there, too")
            image = self._cluster.needs(node.stage).image
            assert image, "the defaults are filled in"
            holds = self.runtime_environment(node.stage)
            require_architecture(self._recipe, node, self._cluster.image(image), holds)
        self._to_come = set(plan.nodes)

    def runtime_environment(self, stage: str) -> RuntimeEnvironment:
        """What a pod like those of `stage` finds, asked once of one such pod.

        It speaks for all: where the nodes of a cluster differ, `node_selector` says which are meant. Raises
        ConfigInvalid if the image holds other code than this installation, Unavailable if it cannot be run.
        """
        needs = self._cluster.needs(stage)
        decisive = {"image", "cpus", "gpus", "node_selector", "tolerations"}
        pool = canonical_json(needs.model_dump(mode="json", include=decisive))
        if pool not in self._runtime_environment:
            name = pods.object_name("about", needs.image or "", self._run, pool)
            self._runtime_environment[pool] = self._ask(needs, name)
        return self._runtime_environment[pool]

    def _ask(self, needs: StageNeeds, name: str) -> RuntimeEnvironment:
        assert needs.image, "the defaults are filled in"
        image = self._cluster.image(needs.image)
        labels = pods.labels(self._run, "about")
        template = pods.pod_template(self._cluster, needs, [*_ENTRYPOINT, "--about"], labels=labels, env={})
        lines: list[str] = []
        job_runner = self._job_runner(name, template, _ABOUT_S, lines.append, self._say)
        try:
            end = job_runner.attend()
        finally:
            with contextlib.suppress(HpmlError):  # it goes by itself, too
                job_runner.stop()
        try:
            return cache_keys.of_image(image, json.loads(lines[-1]), end.image or image)
        except (LookupError, ValueError, TypeError):
            raise Unavailable(
                f"the image {image} does not say what it holds",
                why=end.cause or " ".join(lines[-1:])[:300],
                fix="is it one of ours? cluster.images names them, make images builds them",
            ) from None

    def threads(self, stage: str) -> int:
        """As many as its pod has CPUs."""
        return self._cluster.needs(stage).threads

    # ---------------------------------------------------------------------------------------------- running

    def prepare(self, waiting: tuple[Node, ...]) -> None:
        """Know which steps are to come."""
        self._to_come = {node.name for node in waiting}

    def start(self, node: Node, job: dict[str, Any], log: Path) -> int:
        """Have a thread create a Job and attend to it."""
        self._to_come.discard(node.name)
        number, is_last = next(self._numbers), not self._to_come
        transcript = Transcript(log, Path(job["events"]))
        name = pods.object_name(node.name, self._run)
        template, needs = self._pod_of(node, job, is_last)
        job_runner = self._job_runner(
            name, template, needs.timeout_s, transcript.write, lambda text: self._say(f"{node.name}: {text}")
        )
        image = "" if _is_launched(node) else self.runtime_environment(node.stage).image
        self._running[number] = _Step(node.name, job_runner, transcript, image, is_last)
        threading.Thread(target=self._attend, args=(number, job_runner), name=node.name, daemon=True).start()
        return number

    def _pod_of(self, node: Node, job: dict[str, Any], is_last: bool) -> tuple[Json, StageNeeds]:
        needs = self._cluster.needs(node.stage)
        arguments = arguments_of(Job(**{**job, "events": "-"}))
        labels = pods.labels(self._run, node.name)
        env = pods.environment(self._cluster, self._run, self._recipe.name, node.name)
        if not self._reports:
            del env["HPML_RUN"]
        elif is_last:
            env["HPML_LAST"] = "1"
        if not _is_launched(node):
            command = [*_ENTRYPOINT, *arguments]
            return pods.pod_template(self._cluster, needs, command, labels=labels, env=env), needs
        ours = StageNeeds(cpus=0.5, memory="512Mi", image="client", timeout_s=needs.timeout_s)
        command = [*self._cluster.launcher, "--cluster", self._cluster.model_dump_json(), "--run", self._run]
        template = pods.pod_template(
            self._cluster,
            ours,
            [*command, "--step", node.name, *arguments],
            labels={**labels, "app.kubernetes.io/component": "launcher"},
            env=env,
            account=self._cluster.launcher_account,
        )
        own_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        template["spec"]["containers"][0]["env"].append({"name": "HPML_POD_NAME", "valueFrom": own_name})
        return template, ours

    def _job_runner(
        self, name: str, template: Json, timeout_s: float | None, write: Say, say: Say
    ) -> JobRunner:
        assert timeout_s, "the defaults are filled in"
        labels = {**template["metadata"]["labels"], **pods.queue_label(self._cluster.queue)}
        body = {
            "apiVersion": JOBS.api,
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "backoffLimit": 0,  # a step that failed would fail again; what may pass, it waits for itself
                "activeDeadlineSeconds": int(timeout_s),
                "ttlSecondsAfterFinished": max(_SEEN_WITHIN_S, self._cluster.keep_failed_s),
                "suspend": bool(self._cluster.queue),  # until it admits the Job
                "template": template,
            },
        }
        return JobRunner(self._kube, body, timeout_s, self._cluster.pending_s, write, say)

    def _attend(self, number: int, job_runner: JobRunner) -> None:
        """In a thread of its own: from the creation of a Job to its end, which is put into the queue."""
        try:
            self._owner.adopt(job_runner.body)
            end = job_runner.attend()
        except HpmlError as error:
            end = JobOutcome(error.exit_code, str(error), certain=True)
        except Exception as error:  # of ours; the run is not to wait for this step for ever
            end = JobOutcome(ExitCode.STAGE_FAILED, f"{type(error).__name__}: {error}", certain=True)
        self._ends.put((number, end))

    def signal(self, job: int, number: signal.Signals) -> None:
        """SIGTERM deletes the Job, whose pod has 30 s to save; SIGKILL is not to wait for that any more."""
        if number == signal.SIGKILL:
            end = JobOutcome(ExitCode.TERMINATED, "it was stopped, and not waited for", certain=True)
            self._ends.put((job, end))
            return
        try:
            self._running[job].job_runner.stop()
        except HpmlError as error:
            self._say(f"{self._running[job].name} could not be stopped: {error}")

    def ended(self, timeout_s: float) -> list[StepExit]:
        """The next one that ended, if any did."""
        try:
            number, end = self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return []
        step = self._running.pop(number, None)
        return [StepExit(number, self._concluded(step, end))] if step else []  # None: it was not waited for

    def _concluded(self, step: _Step, end: JobOutcome) -> int:
        """The exit code of a step, whose failure is told where the engine looks for it."""
        if end.exit_code == 0 and end.image and step.image not in ("", end.image):
            cause = _OTHER_IMAGE.format(end.image[:12], step.image[:12])
            end = JobOutcome(ExitCode.CONFIG_INVALID, cause, certain=True)
        said = step.transcript.failure
        if end.exit_code and said and not end.certain:
            step.transcript.fail(said["message"], said["exit_code"], str(said.get("traceback", "")))
        elif end.exit_code:
            step.transcript.fail(end.cause, end.exit_code)
        if end.exit_code and not said:
            status: Status = "KILLED" if end.exit_code == ExitCode.TERMINATED else "FAILED"
            seconds = time.monotonic() - step.started_at_s
            self._pending_events.append((step.name, status, seconds, end.cause))
        self._over.append((step, end))
        return end.exit_code

    # --------------------------------------------------------------------------------------------------- end

    def close(self, status: str) -> None:
        """Delete what the run has in the cluster, except for what failed; see the module."""
        failed = [step.job_runner.name for step, end in self._over if end.exit_code]
        try:
            if self._owner.found and status == "failed" and failed and self._cluster.keep_failed_s:
                for step, _ in self._over:
                    if step.job_runner.name not in failed:
                        self._kube.delete(JOBS, step.job_runner.name)
                self._owner.delete(keep_owned=True)
                self._say(
                    f"what failed is kept for {self._cluster.keep_failed_s} s:"
                    f" kubectl -n {self._cluster.namespace} describe job {' '.join(failed)}"
                )
            elif self._owner.found:
                self._owner.delete()
        except HpmlError as error:
            delete = f"kubectl -n {self._cluster.namespace} delete configmap {self._owner.name}"
            self._say(f"the run was not cleared away: {error} -> {delete}")
        if self._reports and self._over:
            told = any(step.is_last and not end.exit_code for step, end in self._over)
            try:
                self._leave_events(None if told else _MLFLOW_STATUS.get(status, "FAILED"))
            except HpmlError as error:
                self._say(f"MLflow will not hear how the run ended: {error}")

    def _leave_events(self, status: Status | None) -> None:
        """Leave what MLflow does not hear from the steps: ends of those that were killed, and of the run.

        It is put where steps leave what they could not send, and so arrives with the next step of any run.
        status: of the run; None if its last step has told. Raises Unavailable.
        """
        if not self._pending_events and not status:
            return
        with tempfile.TemporaryDirectory(prefix="hpml-") as folder:
            outbox = Outbox(Path(folder, "outbox.jsonl"), self._run, self._recipe.name)
            for name, step_status, seconds, cause in self._pending_events:
                outbox.step_ended(name, step_status, {}, seconds, {"error": cause})
            if status:
                outbox.run_ended(status)
            else:
                outbox.closed()
            uri = f"{self._cluster.store}/tracking/{self._run}/executor.{uuid4().hex[:12]}.jsonl"
            storage.write_text(uri, outbox.path.read_text())


_ENTRYPOINT = ("python", "-m", "hpml.components")
_OTHER_IMAGE = (
    "its node has another image of the same name ({} instead of {}) -> name images by a tag that never"
    " changes, or set cluster.image_pull_policy: Always"
)


def _is_launched(node: Node) -> bool:
    """Whether its work is done by other pods, which it launches."""
    return node.stage == "train" and getattr(node.config, "nodes", 1) > 1
