"""The life of one Job: it is created, what its pod prints is followed, and why it ended is found out."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hpml.core.errors import ExitCode, HpmlError, StageFailed, Unavailable
from hpml.pipelines.cluster import causes, pods
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster.causes import Cause, Patience
from hpml.pipelines.cluster.client import CONFIGMAPS, JOBS, Json, Namespace
from hpml.pipelines.cluster.follower import Follower

CONTAINER = "step"
_LOOK_EVERY_S = 0.5
_STOP_PATIENCE_S = 5.0  # with an API server that is away
_OUR_CODES = {int(code) for code in ExitCode if code}


@dataclass(frozen=True)
class JobOutcome:
    """How a Job ended.

    exit_code: one of ExitCode. cause: what the cluster knows of a failure. certain: whether that is the
    reason, whatever the program said while it was ended; otherwise only the program knows it. image: the
    digest of the image of one that is done, as its node calls it.
    """

    exit_code: int
    cause: str = ""
    certain: bool = False
    image: str = ""


@dataclass
class JobRunner:
    """Creates the Job `body` and stays with it.

    timeout_s: how long it may take, waiting for room included. pending_s: how long its pod may wait for what
    is not room: an image, a Secret, a volume. write: is called with each line of its log. say: is told what
    it waits for.
    """

    cluster: Namespace
    body: Json
    timeout_s: float
    pending_s: float
    write: Callable[[str], None]
    say: Callable[[str], None]
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _waits_for: Cause | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """The name of the Job."""
        return str(self.body["metadata"]["name"])

    def stop(self) -> None:
        """Delete the Job: its program gets SIGTERM and has 30 s to save what it has. Raises HpmlError."""
        self._stopping.set()
        self.cluster.delete(JOBS, self.name, patience_s=_STOP_PATIENCE_S)

    def attend(self) -> JobOutcome:
        """From the creation of the Job to its end. Raises HpmlError if the cluster refuses it or is lost."""
        self.cluster.create(JOBS, self.body)
        if self._stopping.is_set():  # before there was anything to delete
            self.stop()
        follower = Follower(self.cluster, f"job-name={self.name}", CONTAINER)
        room, others = Patience(self.timeout_s, self.say), Patience(self.pending_s, self.say)
        while True:
            pods = follower.look()
            job, pod = self.cluster.get(JOBS, self.name), pods[-1] if pods else None
            is_reading = any(follower.is_reading.values())
            if not is_reading and (end := self._end(job, pod)):
                return end
            waiting = self._waiting(follower, job, pods)
            self._waits_for = next(iter(waiting.values()), None)
            for_room = {name: why for name, why in waiting.items() if _is_for_room(why)}
            try:
                room.look(for_room)
                others.look({} if for_room else waiting)
            except Unavailable:
                self.cluster.delete(JOBS, self.name)  # or it would start when nobody looks any more
                raise
            for _, line in follower.lines(self.timeout_s if is_reading else _LOOK_EVERY_S):
                if isinstance(line, HpmlError):
                    raise line
                self.write(line)

    def _waiting(self, follower: Follower, job: Json | None, pods: list[Json]) -> dict[str, Cause]:
        """Why its program does not run, by the name of its pod; empty if it does, did, or never will."""
        if job is None or _failure(job) or (pods and causes.has_started(pods[-1], CONTAINER)):
            return {}
        if not pods and job["spec"].get("suspend"):
            why = f"the Job {self.name} is suspended until its queue admits it"
            fix = "is Kueue there, and the queue? cluster.queue names it"
            return {"": Cause("Suspended", why, fix, waits=True)}
        return follower.why_waiting(job, pods)

    # --------------------------------------------------------------------------------------------------- end

    def _end(self, job: Json | None, pod: Json | None) -> JobOutcome | None:
        """None: it has not ended, or the cluster has not yet noted that it has."""
        code = causes.exit_code(pod, CONTAINER) if pod else None
        if pod and code == 0:
            return JobOutcome(ExitCode.DONE, image=_image_digest(pod))
        if self._stopping.is_set() and (code is not None or pod is None):
            return JobOutcome(ExitCode.TERMINATED, "it was stopped")
        if job and _failure(job) == "DeadlineExceeded":
            return self._end_by_deadline()
        why = causes.cause(pod, ()) if pod else None
        if why and not why.waits:
            return _end_of_pod(why, code)
        if pod is None and job is None:
            return JobOutcome(ExitCode.UNAVAILABLE, "somebody deleted its Job", certain=True)
        if pod is None and job and _failure(job):
            cause = f"its pod was deleted or evicted ({_failure(job)}) -> run again: it resumes"
            return JobOutcome(ExitCode.UNAVAILABLE, cause, certain=True)
        return None

    def _end_by_deadline(self) -> JobOutcome:
        if self._waits_for:
            cause = f"it did not start within {self.timeout_s:.0f} s: {self._waits_for.why}"
            fix = self._waits_for.fix or "raise cluster.timeout_s"
            return JobOutcome(ExitCode.UNAVAILABLE, f"{cause} -> {fix}", certain=True)
        cause = f"it took longer than its timeout of {self.timeout_s:.0f} s"
        fix = "raise cluster.timeout_s, or timeout_s of its stage under cluster.stages"
        return JobOutcome(ExitCode.STAGE_FAILED, f"{cause} -> {fix}", certain=True)


def _end_of_pod(why: Cause, code: int | None) -> JobOutcome:
    """What the end of a pod for the reason `why` means; code: of its program."""
    if why.reason == "Error":  # the program's own doing
        return JobOutcome(code if code in _OUR_CODES else ExitCode.STAGE_FAILED, why.why)
    failed = ExitCode.STAGE_FAILED if why.reason == "OOMKilled" else ExitCode.UNAVAILABLE
    return JobOutcome(failed, f"{why.why} -> {why.fix or 'run again: it resumes'}", certain=True)


def _failure(job: Json) -> str:
    """The reason of a Job that has failed, or that is about to; empty if it has not."""
    holding = causes.conditions(job)
    failed = holding.get("Failed") or holding.get("FailureTarget")
    return str(failed.get("reason") or "Failed") if failed else ""


def _is_for_room(cause: Cause) -> bool:
    """Whether others have what is waited for, and will give it back."""
    return cause.reason in ("Unschedulable", "Suspended") or "exceeded quota" in cause.why


def _image_digest(pod: Json) -> str:
    """The digest of the image that the container runs, without the registry's name."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        if status["name"] == CONTAINER:
            found = re.search(r"sha256:([0-9a-f]{64})$", str(status.get("imageID", "")))
            return found[1] if found else ""
    return ""


class RunOwner:
    """The ConfigMap that owns the Jobs of a run; made for the first of them. found: it, once it is there."""

    def __init__(self, namespace: kube.Namespace, run: str, recipe: str) -> None:
        self._kube, self._lock = namespace, threading.Lock()
        self.name = pods.object_name("hpml", run)
        self.found: Json | None = None
        self._described = {
            "apiVersion": CONFIGMAPS.api,
            "kind": "ConfigMap",
            "metadata": {"name": self.name, "labels": pods.labels(run, "run")},
            "data": {"run": run, "recipe": recipe},
        }

    def adopt(self, body: Json) -> None:
        """Make what `body` describes go when we do."""
        with self._lock:
            self.found = (
                self.found
                or self._kube.create(CONFIGMAPS, self._described)
                or self._kube.get(CONFIGMAPS, self.name)
            )
        if self.found is None:
            raise StageFailed(f"somebody deleted the ConfigMap {self.name}", fix="run again")
        body["metadata"]["ownerReferences"] = [pods.owner_reference(self.found)]

    def delete(self, *, keep_owned: bool = False) -> None:
        """Go, with all that was adopted, or alone."""
        self._kube.delete(CONFIGMAPS, self.name, keep_owned=keep_owned)
