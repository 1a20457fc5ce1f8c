"""A small cluster for tests that runs Jobs: each gets a pod, whose program is a function of the test."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hpml.components.__main__ import about
from tests.pipelines.fake_cluster import FakeCluster, _chosen

Json = dict[str, Any]
Write = Callable[[str], None]
Program = Callable[[Json, Write, threading.Event], int]
DIGEST = "ab" * 32

_OF_THE_CLUSTER = re.compile(r"/apis?/(?:[\w.-]+/)?v\w+/(?P<plural>\w+)(?:/(?P<name>[^/]+))?")


_about = cache(about)


def ends(*lines: str, code: int = 0) -> Program:
    """A program that prints `lines` and ends."""

    def program(_pod: Json, write: Write, _stop: threading.Event) -> int:
        for line in lines:
            write(line)
        return code

    return program


class FakeJobs(FakeCluster):
    """A cluster with a Job controller and a node.

    program: what a pod runs (its object, where it prints to, an event that stands for SIGTERM); returns its
    exit code. What asks for `--about` is answered in `about`. denied: what nobody may, as (verb, plural).
    paths: what is answered at paths such as /version. runs_pods: whether there is a node.
    """

    def __init__(self) -> None:
        plurals = (
            "pods",
            "events",
            "jobs",
            "configmaps",
            "secrets",
            "serviceaccounts",
            "services",
            "rolebindings",
            "networkpolicies",
        )
        super().__init__(plurals=plurals)
        self.program: Program = ends()
        self.about: Json = _about()
        self.image = DIGEST
        self.denied: set[tuple[str, str]] = set()
        self.paths: dict[str, Json] = {}
        self.runs_pods = True
        self.jobs: dict[str, Json] = {}  # every one that was ever created
        self.stops: dict[str, threading.Event] = {}  # by Job
        self.on_create = self._created
        self.add("namespaces", {"metadata": {"name": self.namespace}})

    def add_secret(self, name: str, **values: str) -> None:
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.add("secrets", {"metadata": {"name": name}, "data": data})

    def end_pod(self, pod: Json, code: int, reason: str = "") -> None:
        """Its program ended."""
        told = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
        with self._lock:
            self.set_state(pod, "Failed" if code else "Succeeded", "step", terminated=told)
            pod["status"]["containerStatuses"][0]["imageID"] = f"registry/x@sha256:{self.image}"

    def pod_of(self, job: Json) -> Json:
        """A new pod of a Job."""
        template, name = job["spec"]["template"], job["metadata"]["name"]
        labels = {**template["metadata"]["labels"], "job-name": name}
        pod = {"metadata": {"name": f"{name}-x", "labels": labels}, "spec": template["spec"]}
        return self.add("pods", {**pod, "status": {"phase": "Pending"}})

    def fail_job(self, name: str, reason: str) -> None:
        """What the controller notes of a Job."""
        condition = {"type": "Failed", "status": "True", "reason": reason}
        with self._lock:
            self.objects["jobs", name]["status"] = {"conditions": [condition]}

    # --------------------------------------------------------------------------------------- the controllers

    def _created(self, item: Json) -> None:
        if item.get("kind") != "Job":
            return
        name = item["metadata"]["name"]
        self.jobs[name] = item
        stop = self.stops.setdefault(name, threading.Event())
        if item["spec"].get("suspend") or not self.runs_pods:
            return
        pod = self.pod_of(item)
        self.set_state(pod, "Running", "step", running={})

        def write(line: str) -> None:
            self.log(pod, line)

        if pod["spec"]["containers"][0]["command"][-1] == "--about":
            write(json.dumps(self.about))
            code = 0
        else:
            code = self.program(pod, write, stop)
        if code >= 0:  # what is below zero has ended its pod itself
            self.end_pod(pod, code)
        if ("jobs", name) not in self.objects:
            super().remove("pods", pod["metadata"]["name"])

    def remove(self, plural: str, name: str) -> None:
        super().remove(plural, name)
        if plural == "jobs":
            self.stops.setdefault(name, threading.Event()).set()

    def _collect(self, owner: str, *, keep: bool) -> None:
        """What the garbage collector does when an owner is deleted."""
        for job in self.all("jobs"):
            owners = job["metadata"].get("ownerReferences", [])
            if any(reference["name"] == owner for reference in owners):
                if keep:
                    del job["metadata"]["ownerReferences"]
                else:
                    self.remove("jobs", job["metadata"]["name"])

    # ------------------------------------------------------------------------------------------ the protocol

    def _answer(self, request: BaseHTTPRequestHandler, body: Json | None) -> None:
        url = urlsplit(request.path)
        if url.path in self.paths:
            return self._send_json(request, 200, self.paths[url.path])
        if url.path.endswith("/selfsubjectaccessreviews"):
            assert body
            asked = body["spec"]["resourceAttributes"]
            plural = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            allowed = (asked["verb"], plural) not in self.denied
            return self._send_json(request, 201, {"status": {"allowed": allowed}})
        found = _OF_THE_CLUSTER.fullmatch(url.path)
        if found and found["name"]:
            item = self.objects.get((found["plural"], found["name"]))
            details = {"kind": found["plural"], "name": found["name"]}
            if item is None:
                return self._refuse(request, 404, "NotFound", "not found", details)
            return self._send_json(request, 200, item)
        if found:
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            chosen = [item for item in self.all(found["plural"]) if _chosen(item, query)]
            return self._send_json(request, 200, {"items": chosen})
        super()._answer(request, body)
        if request.command == "DELETE" and "/configmaps/" in url.path:
            keep = (body or {}).get("propagationPolicy") == "Orphan"
            self._collect(url.path.rpartition("/")[2], keep=keep)
        return None
