"""Why pods do not run, from statuses and events as Kubernetes 1.34 writes them."""

from __future__ import annotations

from typing import Any

import pytest

from hpml.core.errors import Unavailable
from hpml.pipelines.cluster.causes import Cause, Patience, cause, cause_of_refusal, exit_code, has_started

Json = dict[str, Any]


def pod(phase: str = "Pending", **status: Any) -> Json:
    resources = {"limits": {"memory": "1Gi"}}
    return {
        "metadata": {"name": "one"},
        "spec": {"containers": [{"name": "step", "resources": resources}]},
        "status": {"phase": phase, **status},
    }


def container(**state: Json) -> Json:
    return {"containerStatuses": [{"name": "step", "image": "localhost/nosuch:1", "state": state}]}


def event(reason: str, message: str, kind: str = "Warning") -> Json:
    return {"reason": reason, "message": message, "type": kind}


PULL = (
    'Failed to pull image "localhost/nosuch:1": failed to resolve reference "localhost/nosuch:1": failed'
    ' to do request: Head "http://localhost/v2/nosuch/manifests/1": connect: connection refused'
)
NO_ROOM = "0/1 nodes are available: 1 Insufficient cpu."


@pytest.mark.parametrize(
    ("found", "events", "reason", "words"),
    [
        (
            pod(**container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})),
            [event("Failed", PULL), event("Failed", "Error: ErrImagePull")],
            "ImagePullBackOff",
            ["localhost/nosuch:1", "connection refused"],
        ),
        (
            pod(**container(waiting={"reason": "ErrImageNeverPull", "message": "not present with Never"})),
            [],
            "ErrImageNeverPull",
            ["localhost/nosuch:1", "not present with Never"],
        ),
        (
            pod(
                **container(
                    waiting={"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}
                )
            ),
            [],
            "CreateContainerConfigError",
            ["one", 'secret "x" not found'],
        ),
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": NO_ROOM,
                    }
                ]
            ),
            [],
            "Unschedulable",
            ["no node has room", NO_ROOM],
        ),
        (
            pod(**container(waiting={"reason": "ContainerCreating"})),
            [event("Scheduled", "", "Normal"), event("FailedMount", 'secret "hpml-store" not found')],
            "FailedMount",
            ['secret "hpml-store" not found'],
        ),
    ],
)
def test_why_a_pod_waits(found: Json, events: list[Json], reason: str, words: list[str]) -> None:
    why = cause(found, events)
    assert why and why.reason == reason and why.waits
    assert all(word in why.why for word in words)


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (
            pod("Failed", **container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
            "OOMKilled",
            ["more memory than its limit of 1Gi"],
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            "Evicted",
            ["low on resource: memory"],
        ),
        (
            pod("Failed", reason="DeadlineExceeded", message="Pod was active longer than specified deadline"),
            "DeadlineExceeded",
            ["longer than specified deadline"],
        ),
        (
            pod(
                "Failed",
                conditions=[
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "EvictionByEvictionAPI",
                        "message": "Eviction API: evicting",
                    }
                ],
                **container(terminated={"exitCode": 143, "reason": "Error"}),
            ),
            "EvictionByEvictionAPI",
            ["taken away", "Eviction API: evicting"],
        ),
        (
            pod("Running", **container(terminated={"exitCode": 4, "reason": "Error"})),
            "Error",
            ["with exit code 4"],
        ),
        (pod("Failed", **container(terminated={"exitCode": 143})), "Error", ["by signal 15"]),
    ],
)
def test_why_a_pod_ended(found: Json, reason: str, words: list[str]) -> None:
    why = cause(found, [])
    assert why and why.reason == reason and not why.waits
    assert all(word in why.why for word in words)


@pytest.mark.parametrize(
    "found",
    [
        pod(),
        pod(**container(waiting={"reason": "ContainerCreating"})),
        pod("Running", **container(running={})),
        pod("Succeeded", **container(terminated={"exitCode": 0})),
    ],
)
def test_nothing_is_wrong(found: Json) -> None:
    assert cause(found, [event("Scheduled", "", "Normal")]) is None


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ('pods "x" is forbidden: exceeded quota: hpml, requested: pods=1', "quota"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": ...', "Pod Security"),
        ("Internal error occurred: failed calling webhook", ""),
    ],
)
def test_why_there_is_no_pod(message: str, word: str) -> None:
    events = [event("SuccessfulCreate", "", "Normal"), event("FailedCreate", message)]
    why = cause_of_refusal(events)
    assert why and why.waits and message in why.why and word.lower() in why.fix.lower()
    assert cause_of_refusal(events[:1]) is None


def test_what_a_container_does() -> None:
    assert not has_started(pod(), "step")
    assert not has_started(pod(**container(waiting={"reason": "ContainerCreating"})), "step")
    running = pod("Running", **container(running={}))
    assert has_started(running, "step") and exit_code(running, "step") is None
    assert not has_started(running, "another")
    ended = pod("Failed", **container(terminated={"exitCode": 3}))
    assert has_started(ended, "step") and exit_code(ended, "step") == 3


def test_patience_says_what_it_waits_for_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    said: list[str] = []
    patience = Patience(60, said.append)
    pulling, backing_off = (Cause(reason, f"no image ({reason})", "fix it") for reason in ("Err", "BackOff"))

    def look(at_s: float, why: Cause | None) -> None:
        clock[0] = at_s
        patience.look({"one": why} if why else {})

    look(1000, pulling)
    look(1003, pulling)
    assert not said  # it may be over in a moment
    for at_s in (1006, 1010):
        look(at_s, pulling)
    for at_s in (1020, 1030):
        look(at_s, backing_off)
    assert len(said) == 2 and "no image (Err)" in said[0] and "no image (BackOff)" in said[1]
    look(1059, None)  # it runs: what comes now begins anew
    look(1061, pulling)
    look(1120, pulling)
    with pytest.raises(Unavailable, match=r"given up after 60 s: no image \(Err\) -> fix it"):
        look(1121, pulling)
