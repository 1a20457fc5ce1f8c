"""One training as a job of the cluster: made once, followed to its end, what it says passed on.

* The job's name follows from run and step, so a second launcher finds the job of the first and goes on with
  it.
* A launcher that is told to stop deletes the job, at once: a pipeline that is terminated has 0.6 s. One that
  ends otherwise, by a crash or because its pod has to make room, leaves the job to its successor.
* A job that failed is kept by the cluster until its owner goes; one that could only go on failing is deleted.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpml.core.contract import Events, canonical_json
from hpml.core.errors import ExitCode, HpmlError, StageFailed, Terminated, Unavailable
from hpml.io.relay import read_event
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.causes import Cause, Patience, cause, conditions, exit_code
from hpml.pipelines.cluster.client import PODS, Json, Namespace, Say, say_on_stderr
from hpml.pipelines.cluster.follower import Follower, Line
from hpml.pipelines.operators.base import Operator, State, Training

SPEC_DIGEST = "hpml.dev/spec"  # an annotation: what the job was made of
RESTARTS_PER_NODE = 5  # without getting any further, before a training is given up
POLL_S = 1.0
ERROR = "error: "  # how a worker's last words begin, see hpml.core.errors


@dataclass
class _Node:
    """A pod of the job, as far as we have seen it. error: the last that its log said went wrong."""

    name: str
    index: str
    exit_code: int | None = None
    cause: Cause | None = None
    error: str = ""


@dataclass
class Launch:
    """Runs `training` by a job of `operator`; see the module.

    events: where the progress and the metrics that rank 0 reports are passed on to. owner: what the job goes
    with, as a reference, or None. pod: the name of the launcher's own, where it has one.
    """

    operator: Operator
    training: Training
    kube: Namespace
    events: Events
    owner: Json | None = None
    pod: str = ""
    say: Say = say_on_stderr
    _nodes: dict[str, _Node] = field(default_factory=dict, init=False)  # by the uid of the pod
    _progress: dict[str, Any] = field(default_factory=dict, init=False)  # the furthest that was told
    _failed: dict[str, Any] = field(default_factory=dict, init=False)  # what rank 0 failed of since
    _restarts: int = field(default=0, init=False)  # of pods since
    _deadlines_s: dict[float, float] = field(default_factory=dict, init=False)  # monotonic, by its start

    @cached_property
    def _follower(self) -> Follower:
        return Follower(self.kube, self.operator.pods_of(self.training.name), self.operator.container)

    def run(self) -> None:
        """Return when the training is done.

        Raises what the training failed of; StageFailed if it took too long, got no further, or another one
        has its name; Unavailable if its pods could not run, or the cluster does not answer; Terminated.
        """
        with self._deleted_if_stopped():
            job = self._made_or_found()
            state = self._followed(job)
            self._pass_on(self._follower.last_lines())
        if state.phase == "failed":
            raise self._failure(state)
        self._delete()

    # ---------------------------------------------------------------------------------- making and deleting

    def _made_or_found(self) -> Json:
        """The job of this training, the only one: made, or found to be there already."""
        wanted = self._owned(self.operator.job(self.training))
        companions = [(kind, self._owned(item)) for kind, item in self.operator.companions(self.training)]
        specs = [wanted["spec"], *(item["spec"] for _, item in companions)]
        digest = hashlib.sha256(canonical_json(specs).encode()).hexdigest()[:16]
        wanted["metadata"]["annotations"] = {SPEC_DIGEST: digest}
        while True:
            found = self.kube.get(self.operator.resource, self.training.name)
            if found and (adopted := self._adopted(found, digest)):
                return adopted
            for kind, item in companions:  # one that is there already goes soon, with an earlier job
                self.kube.create(kind, item) or self.kube.patch(kind, self.training.name, item)
            if made := self.kube.create(self.operator.resource, wanted):
                owned = {"metadata": {"ownerReferences": [pods.owner_reference(made)]}}
                for kind, _ in companions:
                    self.kube.patch(kind, self.training.name, owned)
                self.say(f"created {self._called(made)}, for {self.training.config.nodes} nodes")
                return made

    def _owned(self, described: Json) -> Json:
        owners = {"ownerReferences": [self.owner]} if self.owner else {}
        return {**described, "metadata": {**described.get("metadata", {}), **owners}}

    def _adopted(self, found: Json, digest: str) -> Json | None:
        """A job of our name, made ours; None once it is gone, if it was over. Else raises StageFailed."""
        is_same = found["metadata"].get("annotations", {}).get(SPEC_DIGEST) == digest
        phase, uid = self.operator.state(found).phase, found["metadata"]["uid"]
        if found["metadata"].get("deletionTimestamp"):
            self.say(f"{self._called(found)} is being deleted: waiting for its end")
        elif phase == "failed" or (phase == "succeeded" and not is_same):
            self.say(f"{self._called(found)} {phase}, in an earlier attempt: replacing it")
            self.kube.delete(self.operator.resource, self.training.name, uid=uid)
        elif is_same:
            self.say(f"{self._called(found)} is there already: going on with it")
            # To patch it is also what keeps it from the garbage collector, if its owner has just gone.
            return self.kube.patch(self.operator.resource, self.training.name, self._owned({}))
        else:
            kind, name = self.operator.resource.plural, self.training.name
            raise StageFailed(
                f"{self._called(found)} is running, and it is not the training that was asked for",
                why="its image, config or resources differ",
                fix=f"wait for its end, or stop it: kubectl -n {self.kube.name} delete {kind} {name}",
            )
        self.kube.wait_until_gone(self.operator.resource, self.training.name, uid=uid)
        return None

    @contextmanager
    def _deleted_if_stopped(self) -> Iterator[None]:
        try:
            yield
        except (Terminated, KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                if self._makes_room():
                    self.say("this pod has to make room: the training goes on, for the next launcher to find")
                else:
                    self._delete(patience_s=0.0)
            except HpmlError as error:
                self.say(f"the training may go on without us: {error}")
            raise

    def _makes_room(self) -> bool:
        """Whether our pod is evicted or preempted, which it is marked with before it is told to stop."""
        found = self.kube.get(PODS, self.pod, patience_s=0.0) if self.pod else None
        return bool(found) and "DisruptionTarget" in conditions(found or {})

    def _delete(self, *, patience_s: float | None = None) -> None:
        self.kube.delete(self.operator.resource, self.training.name, patience_s=patience_s)

    def _called(self, job: Json) -> str:
        return f"{job['kind']} {self.kube.name}/{job['metadata']['name']}"

    # ------------------------------------------------------------------------------------------ following it

    def _followed(self, job: Json) -> State:
        """How the job ended."""
        patience = Patience(self.training.cluster.pending_s, self.say)
        was_queued = False
        while True:
            found = self.kube.get(self.operator.resource, self.training.name)
            if found is None or found["metadata"]["uid"] != job["metadata"]["uid"]:
                raise StageFailed(
                    f"{self._called(job)} was deleted, and not by us",
                    fix="run again: it resumes from the last checkpoint",
                )
            seen = self._follower.look()
            self._look_at(seen)
            state = self.operator.state(found)
            if state.phase in ("succeeded", "failed"):
                return state
            if state.phase == "queued" and not was_queued:
                self.say(f"{self._called(job)} waits for its turn: {state.message}")
            was_queued = state.phase == "queued"
            if not was_queued:
                try:
                    self._check_time(state)
                    self._check_restarts()
                    patience.look(self._waiting(found, seen))
                except (StageFailed, Unavailable):
                    self._delete()
                    raise
            self._pass_on(self._follower.lines(POLL_S))

    def _look_at(self, seen: list[Json]) -> None:
        """Remember which pods there were, and how they ended."""
        for pod in seen:
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            if uid not in self._nodes:
                index = str(pod["metadata"].get("labels", {}).get(self.operator.index_label, "?"))
                if any(node.index == index for node in self._nodes.values()):
                    self._restarts += 1
                    self.say(f"node {index} is started again, as the pod {name}")
                self._nodes[uid] = _Node(name, index)
            node = self._nodes[uid]
            if node.cause is None and (ended := cause(pod, ())) and not ended.waits:
                node.cause, node.exit_code = ended, exit_code(pod, self.operator.container)
                self.say(f"{ended.why} ({ended.reason})")

    def _waiting(self, job: Json, seen: list[Json]) -> dict[str, Cause]:
        """Why there are no pods, or why those that are to run do not: by name."""
        running = [pod for pod in seen if pod["status"].get("phase") != "Pending"]
        if len(running) >= self.training.min_nodes:
            return {}
        why = f"no pod of {self._called(job)} has been created"
        no_pods = {"": Cause("NoPods", why, "is the training operator running? hpml doctor", waits=True)}
        return self._follower.why_waiting(job, seen) or ({} if seen else no_pods)

    def _check_time(self, state: State) -> None:
        """Raises StageFailed if the training is over its limit, at which the operator looks now and then."""
        if not state.started_at_s:
            return
        # The wall clock is read once: it may jump.
        left_s = state.started_at_s + self.training.timeout_s - time.time()
        deadline_s = self._deadlines_s.setdefault(state.started_at_s, time.monotonic() + left_s)
        if time.monotonic() > deadline_s:
            raise self._out_of_time()

    def _check_restarts(self) -> None:
        """Raises StageFailed if pods end again and again, such as for want of memory."""
        if self._restarts <= RESTARTS_PER_NODE * self.training.config.nodes:
            return
        causes = [Cause("", "see the log"), *self._causes()]
        telling = [one for one in causes if one.reason not in ("", "Error")] or causes
        what = f"nodes were started again {self._restarts} times, and the training got no further"
        raise StageFailed(what, why=telling[-1].why, fix=telling[-1].fix)

    def _causes(self) -> list[Cause]:
        return [node.cause for node in self._nodes.values() if node.cause]

    # ----------------------------------------------------------------------------------------- what it says

    def _pass_on(self, lines: Iterable[Line]) -> None:
        for uid, line in lines:
            node = self._nodes[uid]
            if isinstance(line, HpmlError):
                self.say(f"the log of {node.name} cannot be followed: {line}")
            else:
                self._pass_on_line(node, line)

    def _pass_on_line(self, node: _Node, line: str) -> None:
        event = read_event(line)
        if event is None:
            if line.startswith(ERROR):
                node.error = line.removeprefix(ERROR)
            printable = "".join(char if char.isprintable() else " " for char in line)  # for a terminal
            print(f"node {node.index} | {printable}", flush=True)
            return
        kind = event.pop("event")
        if kind == "failed":
            self._failed = event
        elif kind == "metric":
            self.events.write(kind, **event)
        elif kind == "progress":
            self.events.write(kind, **event)
            if event["done"] > self._progress.get("done", -1):
                self._progress, self._failed, self._restarts = event, {}, 0

    # --------------------------------------------------------------------------------------- how it failed

    def _failure(self, state: State) -> HpmlError:
        """What the training failed of: in its own words, in those of another worker, or in Kubernetes'."""
        kind, name = self.operator.resource.plural, self.training.name
        self.say(f"what is left of it is kept: kubectl -n {self.kube.name} get {kind} {name} -o yaml")
        if "deadline" in state.message:
            return self._out_of_time()
        final = [node for node in self._nodes.values() if node.exit_code and node.exit_code < 128]
        codes = {node.exit_code for node in final} or set(_CODES)
        if self._failed and self._failed["exit_code"] in codes:
            what, code = self._failed["message"], self._failed["exit_code"]
        elif final:
            what = final[0].error or f"node {final[0].index} ended with exit code {final[0].exit_code}"
            code = final[0].exit_code
        else:
            why = [Cause("", state.message, "its log says more"), *self._causes()][-1]
            return StageFailed("the training failed", why=why.why, fix=why.fix)
        error = HpmlError(what)
        if code in _CODES:
            error.exit_code = ExitCode(code)
        return error

    def _out_of_time(self) -> StageFailed:
        told = self._progress
        how_far = (
            f"it got to {told['done']} of {told['total']} {told['unit']}" if told else "it had not begun"
        )
        return StageFailed(
            f"the training took longer than its limit of {self.training.timeout_s} s",
            why=how_far,
            fix="set cluster.stages.train.timeout_s, and run again: it resumes from the last checkpoint",
        )


_CODES = (ExitCode.USAGE, ExitCode.CONFIG_INVALID, ExitCode.STAGE_FAILED, ExitCode.GATE_FAILED)
