"""Why a pod does not run, or did not end well: its status and its events, in sentences with a remedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpml.core.errors import Unavailable

Json = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Why a pod does not run, or did not end well.

    reason: Kubernetes' word for it, such as ImagePullBackOff. why: a sentence. fix: what to do. waits: if
    the pod still waits and could come to run by itself.
    """

    reason: str
    why: str
    fix: str = ""
    waits: bool = False


IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
IMAGE_REASONS |= {"RegistryUnavailable"}
_IMAGE_FIX = "check cluster.images, and cluster.image_pull_secrets"
_ROOM_FIX = "ask for less (cluster.stages: cpus, memory, gpus), or add nodes"
_REFUSAL_FIXES = {  # by words of the refusal
    "exceeded quota": "ask for less (cluster.stages), wait for others to finish, or have the ResourceQuota"
    " raised",
    "violates PodSecurity": "the namespace enforces Pod Security, and something adds to our pods what it"
    " refuses",
}
CONTAINER_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}

ContainerState = Literal["waiting", "running", "terminated", ""]


def container_state(pod: Json, container: str) -> tuple[ContainerState, Json]:
    """Which state a container of `pod` is in, and what Kubernetes says about it; "": it has none yet."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        if status["name"] == container:
            for name in ("terminated", "running", "waiting"):
                if name in (status.get("state") or {}):
                    return name, status["state"][name]
    return "", {}


def has_started(pod: Json, container: str) -> bool:
    """Whether there is a log to read."""
    return container_state(pod, container)[0] in ("running", "terminated")


def exit_code(pod: Json, container: str) -> int | None:
    """The exit status of a container that ended; None if it has not, or was never started."""
    state, told = container_state(pod, container)
    return int(told["exitCode"]) if state == "terminated" else None


def conditions(item: Json, status: str = "True") -> dict[str, Json]:
    """The conditions of an object that hold (with "False", that do not), by type."""
    found = (item.get("status") or {}).get("conditions") or ()
    return {condition["type"]: condition for condition in found if condition["status"] == status}


def cause(pod: Json, events: Iterable[Json]) -> Cause | None:
    """Why `pod` does not run or did not end well, from its status and its events; None if all is well."""
    return _cause_of_end(pod) or _cause_of_waiting(pod, list(events))


def cause_told(message: str) -> Cause | None:
    """Why a pod waits, from what Argo says of it, "REASON: MESSAGE"; None if it is on its way."""
    reason, _, told = message.partition(": ")
    if reason in IMAGE_REASONS:
        why, fix = f"the node cannot get the image: {told or reason}", _IMAGE_FIX
    elif reason in CONTAINER_REASONS:
        why = f"the node cannot start the pod: {told or reason}"
        fix = "are the store's Secret and what k8s/ sets up there? k8s/make-secrets NAMESPACE; hpml doctor"
    elif reason == "Unschedulable":
        why, fix = f"no node has room: {told.partition('. ')[0]}", _ROOM_FIX
    else:
        return None
    return Cause(reason, why, fix, waits=True)


def cause_of_refusal(events: Iterable[Json]) -> Cause | None:
    """Why the controller of a job could not create a pod, from the events of the job; None if it could."""
    refused = [event for event in events if str(event.get("reason", "")).startswith("FailedCreate")]
    if not refused:
        return None
    message = str(refused[-1].get("message", ""))
    fix = next((fix for words, fix in _REFUSAL_FIXES.items() if words in message), "")
    why = f"the cluster refuses to create the pod: {message}"
    return Cause(str(refused[-1]["reason"]), why, fix, waits=True)


def _cause_of_end(pod: Json) -> Cause | None:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    memory = "raise cluster.stages.<stage>.memory, or lower the batch size"
    ended = [
        (container["name"], (container.get("state") or {}).get("terminated") or {})
        for container in status.get("containerStatuses") or ()
    ]
    for container, told in ended:
        if told.get("reason") == "OOMKilled":
            [spec] = [spec for spec in pod["spec"]["containers"] if spec["name"] == container]
            limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory", "its node")
            return Cause("OOMKilled", f"the pod {name} used more memory than its limit of {limit}", memory)
    reason = str(status.get("reason", ""))
    if status.get("phase") == "Failed" and reason:  # the node ended it, not the program
        why = f"the pod {name} was ended: {status.get('message') or reason}"
        fixes = {"Evicted": memory, "DeadlineExceeded": "raise cluster.timeout_s"}
        return Cause(reason, why, fixes.get(reason, ""))
    if condition := conditions(pod).get("DisruptionTarget"):
        why = f"the pod {name} was taken away: {condition.get('message') or condition.get('reason')}"
        return Cause(str(condition.get("reason", "DisruptionTarget")), why)
    for _, told in ended:
        if told.get("reason") in ("StartError", "ContainerCannotRun"):
            why = f"the node cannot start the pod {name}: {told.get('message') or 'no reason told'}"
            return Cause("StartError", why, "is its image one of ours? cluster.images names them")
        if code := told.get("exitCode"):
            how = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
            return Cause("Error", f"the pod {name} ended {how}")
    return None


def _cause_of_waiting(pod: Json, events: list[Json]) -> Cause | None:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("phase") != "Pending":
        return None
    for container in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or []):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason in IMAGE_REASONS:
            why = f"the node cannot get the image {container.get('image')}: {_pull_error(waiting, events)}"
            return Cause(reason, why, _IMAGE_FIX, waits=True)
        if reason in CONTAINER_REASONS:
            why = f"the node cannot start the pod {name}: {waiting.get('message') or reason}"
            return Cause(reason, why, "is what k8s/base sets up there? kubectl apply -k k8s/base", waits=True)
    if condition := conditions(pod, "False").get("PodScheduled"):
        reason = str(condition.get("reason", ""))
        brief = str(condition.get("message", "")).partition(". ")[0]  # the rest is about preemption
        why = f"no node has room for the pod {name}: {brief}"
        return Cause(reason, why, _ROOM_FIX if reason == "Unschedulable" else "", waits=True)
    warnings = [event for event in events if event.get("type") == "Warning"]
    if warnings:  # such as FailedMount, FailedCreatePodSandBox
        why = f"the pod {name} does not start: {warnings[-1].get('message', '')}"
        return Cause(str(warnings[-1].get("reason", "")), why, waits=True)
    return None


def _pull_error(waiting: Json, events: list[Json]) -> str:
    """What the registry said: the back-off itself only names the image."""
    failed = [str(event.get("message", "")) for event in events if event.get("reason") == "Failed"]
    told = [text for text in failed if text.startswith("Failed to pull")]
    return told[-1] if told else str(waiting.get("message") or waiting.get("reason"))


SAY_AFTER_S = 5.0  # a wait that is worth a word


@dataclass
class Patience:
    """How long pods may wait for an image, for room, or for being created at all, before they are given up.

    say: is told what they wait for, after SAY_AFTER_S, and once for each of Kubernetes' words for it.
    """

    give_up_s: float
    say: Callable[[str], None]
    _since_s: float = field(default=0.0, init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def look(self, causes: Mapping[str, Cause]) -> None:
        """Take note of why each pod (by name) waits now; an empty mapping means that none does.

        Raises Unavailable once pods have waited for `give_up_s` without a break.
        """
        if not causes:
            self._since_s = 0.0
            self._said.clear()
            return
        self._since_s = self._since_s or time.monotonic()
        waited_s, first = time.monotonic() - self._since_s, causes[min(causes)]
        if waited_s >= min(SAY_AFTER_S, self.give_up_s / 2) and first.reason not in self._said:
            self._said.add(first.reason)
            self.say(f"waiting, for {self.give_up_s:.0f} s at most: {first.why} ({first.reason})")
        if waited_s >= self.give_up_s:
            raise Unavailable(f"given up after {self.give_up_s:.0f} s", why=first.why, fix=first.fix)
