"""A small Kubeflow Pipelines on this machine: an HTTP server that a test tells what to answer.

It has the limits of the real one (2.17.0 with Argo 4.0): user interface and API serve different paths; a log
that is not there is a 200 with `error_message`; nodes of more than 1 MiB are packed, and `task_details` are
then those of before.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

RUN_ID = "0b6a5b0e-1111-4222-8333-444455556666"
WORKFLOW = "quickstart-x7f2p"
PACKED_ABOVE_BYTES = 1 << 20

Answer = tuple[int, Any]  # a status, and JSON or bytes


def node_id(name: str) -> str:
    """The id that Argo gives to a node: the FNV-1a hash of its full name, behind the workflow's."""
    value = 2166136261
    for byte in name.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return f"{WORKFLOW}-{value}"


def node(path: str, phase: str, kind: str = "DAG", message: str = "", padding: int = 0) -> dict[str, Any]:
    """A node as Argo has it. path: below the workflow, such as "root(0).train". padding: a pod's spec."""
    name = f"{WORKFLOW}(0).{path}" if path else WORKFLOW
    templates = {"executor": "system-container-impl", "driver": "system-container-driver"}
    ended = phase in ("Succeeded", "Failed", "Error", "Skipped")
    return {
        "id": node_id(name),
        "name": name,
        "displayName": path.rpartition(".")[2],
        "type": kind,
        "phase": phase,
        "message": message,
        "templateName": templates.get(re.sub(r".*[.-]|\(\d+\)", "", path), "system-container-executor"),
        "startedAt": "2026-11-21T10:00:10Z",
        "finishedAt": "2026-11-21T10:00:15Z" if ended else None,
        "inputs": {"parameters": [{"name": "pod-spec-patch", "value": "x" * padding}]},
    }


def driver_node(task: str, phase: str, message: str = "") -> list[dict[str, Any]]:
    """The nodes of the driver of a task."""
    path = f"root(0).{task}-driver"
    return [node(path, phase, "Retry", message), node(f"{path}(0)", phase, "Pod", message)]


def task_nodes(task: str, phase: str, message: str = "", padding: int = 0) -> list[dict[str, Any]]:
    """The nodes of a task with its driver and its pod, where nodes may be tried again (KFP's default).

    Those above a pod that is Pending are Running.
    """
    above = "Running" if phase == "Pending" else phase
    return [
        *driver_node(task, "Succeeded"),
        node(f"root(0).{task}", above, "Retry"),
        node(f"root(0).{task}(0)", above),
        node(f"root(0).{task}(0).executor", above, "Retry"),
        node(f"root(0).{task}(0).executor(0)", phase, "Pod", message, padding),
    ]


def cached_nodes(task: str) -> list[dict[str, Any]]:
    """The nodes of a task that was taken from the cache: its executor is skipped."""
    return [
        *driver_node(task, "Succeeded"),
        node(f"root(0).{task}", "Succeeded", "Retry"),
        node(f"root(0).{task}(0)", "Succeeded"),
        node(f"root(0).{task}(0).executor", "Skipped", "Skipped"),
    ]


def pod_of(task: str) -> str:
    """The pod of `task_nodes`, or of a driver: pod_of("train-driver")."""
    if task.endswith("-driver"):
        name, template = f"root(0).{task}(0)", "driver"
    else:
        name, template = f"root(0).{task}(0).executor(0)", "impl"
    number = node_id(f"{WORKFLOW}(0).{name}").rpartition("-")[2]
    return f"{WORKFLOW}-system-container-{template}-{number}"


@dataclass
class State:
    """A run at a moment: what version 2 of the API tells of it, and the nodes of its workflow."""

    told: dict[str, Any]
    nodes: list[dict[str, Any]]

    def manifest(self) -> str:
        """Of the workflow."""
        nodes = {item["id"]: item for item in self.nodes}
        data = json.dumps(nodes).encode()
        if len(data) > PACKED_ABOVE_BYTES:
            status = {"compressedNodes": base64.b64encode(gzip.compress(data)).decode()}
        else:
            status = {"nodes": nodes}
        return json.dumps({"metadata": {"name": WORKFLOW}, "status": status})


def run(
    state: str, nodes: list[dict[str, Any]], error: str = "", history: tuple[str, ...] = (), seconds: int = 60
) -> State:
    """A run as the API tells it. history: states that it had before."""
    attempts = [node("root", "Running", "Retry"), node("root(0)", "Running")]
    told: dict[str, Any] = {
        "run_id": RUN_ID,
        "state": state,
        "state_history": [{"state": each} for each in (*history, state)],
        "created_at": "2026-11-21T10:00:00Z",
    }
    if state in ("SUCCEEDED", "FAILED", "CANCELED"):
        told["finished_at"] = f"2026-11-21T10:{seconds // 60:02}:{seconds % 60:02}Z"
    if error:
        told["error"] = {"code": 13, "message": error}
    return State(told, [*attempts, *nodes])


@dataclass
class Api:
    """What the server answers, and what it was asked.

    serves: whose address it is. runs: what each request for the run is answered with, the last one again and
    again. logs: by pod. overrides: instead of all that, by the beginning of "METHOD /path".
    """

    serves: Literal["ui", "api"] = "ui"
    multi_user: bool = False
    experiments: dict[str, str] = field(default_factory=dict)
    runs: list[State] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    overrides: dict[str, Answer | Callable[[], Answer]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    host: str = ""
    _now: State | None = None
    _frozen: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, method: str, target: str, body: Any, headers: dict[str, str]) -> Answer:
        parts = urlsplit(target)
        path, query = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.asked.append(f"{method} {path}")
        self.headers.append(headers)
        if body is not None:
            self.bodies.append((path, body))
        for beginning, given in self.overrides.items():
            if f"{method} {path}".startswith(beginning):
                return given() if callable(given) else given
        if path == "/apis/v2beta1/healthz":
            return 200, {"multi_user": self.multi_user, "pipeline_store": "database"}
        if path == "/apis/v2beta1/experiments":
            return self._experiments(method, query, body)
        if (method, path) == ("POST", "/apis/v2beta1/runs"):
            return 200, {"run_id": RUN_ID, "state": "PENDING"}
        if (method, path) == ("POST", "/apis/v2beta1/recurringruns"):
            return 200, {"recurring_run_id": "every-night"}
        if path == f"/apis/v2beta1/runs/{RUN_ID}":
            self._now = self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
            return 200, {**self._now.told, "run_details": {"task_details": self._details()}}
        if path == f"/apis/v1beta1/runs/{RUN_ID}":
            now = self._now or self.runs[0]
            return 200, {"run": {"id": RUN_ID}, "pipeline_runtime": {"workflow_manifest": now.manifest()}}
        if self.serves == "ui":
            return self._page(path, query)
        if path.startswith(f"/apis/v1alpha1/runs/{RUN_ID}/nodes/"):
            text = self.logs.get(path.split("/")[-2])
            return 200, text.encode() if text is not None else {"error_message": "no such pod"}
        return 404, {"error": "Not Found", "code": 5, "message": "Not Found"}

    def _page(self, path: str, query: dict[str, str]) -> Answer:
        if path == "/k8s/pod/logs":
            assert query["runid"] == RUN_ID
            text = self.logs.get(query["podname"])
            if text is None:
                return 500, b"Could not get main container logs: Error: Unable to retrieve workflow status"
            return 200, text.encode()
        if path == "/artifacts/get":
            found = self.artifacts.get(f"{query['source']}://{query['bucket']}/{query['key']}")
            return (200, found) if found is not None else (500, b"Failed to get object in bucket")
        return 404, f"<!DOCTYPE html><pre>Cannot GET {path}</pre>".encode()

    def _details(self) -> list[dict[str, Any]]:
        """As the API server makes them of nodes; it does not unpack them, so they are those of before."""
        assert self._now
        if "compressedNodes" not in self._now.manifest():
            states = {"Error": "FAILED"}
            self._frozen = [
                {
                    "display_name": item["displayName"],
                    "state": states.get(item["phase"], item["phase"].upper()),
                }
                for item in self._now.nodes
            ]
        return self._frozen

    def _experiments(self, method: str, query: dict[str, str], body: Any) -> Answer:
        if method == "POST":
            self.experiments[body["display_name"]] = "experiment-new"
            return 200, {"experiment_id": "experiment-new", **body}
        (predicate,) = json.loads(query["filter"])["predicates"]
        assert (predicate["operation"], predicate["key"]) == (1, "display_name")
        found = self.experiments.get(predicate["stringValue"])
        return 200, {"experiments": [{"experiment_id": found}]} if found else {}


@contextmanager
def serving(api: Api) -> Iterator[Api]:
    """`api` on a port of this machine; its `host` is the URL."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, given = api.answer(self.command, self.path, body, dict(self.headers))
            data = given if isinstance(given, bytes) else json.dumps(given).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/dex/auth")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    api.host = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
