"""A small Kubeflow Pipelines API on this machine: an HTTP server that a test tells what to answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

RUN_ID = "0b6a5b0e-1111-4222-8333-444455556666"
WORKFLOW = "quickstart-x7f2p"

Answer = tuple[int, Any]  # a status, and JSON or bytes


def node_id(workflow: str, name: str) -> str:
    """The id that Argo gives to a node: the FNV-1a hash of its full name, behind the workflow's."""
    value = 2166136261
    for byte in name.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return f"{workflow}-{value}"


def node(name: str, state: str, *children: str, seconds: int = 5) -> dict[str, Any]:
    """A task detail as KFP 2.17's API server makes it of a node of the workflow."""
    ended = state in ("SUCCEEDED", "FAILED", "SKIPPED")
    return {
        "run_id": RUN_ID,
        "task_id": f"id-of-{name}",
        "display_name": name,
        "create_time": "2026-11-21T10:00:00Z",
        "start_time": "2026-11-21T10:00:10Z",
        "end_time": f"2026-11-21T10:00:{10 + seconds}Z" if ended else "1970-01-01T00:00:00Z",
        "state": state,
        "execution_id": "0",
        "child_tasks": [{"pod_name": child} for child in children],
    }


def task_nodes(task: str, state: str) -> list[dict[str, Any]]:
    """The nodes of a task with its driver and its pod, where nodes may be tried again (KFP's default)."""
    executor = node_id(WORKFLOW, f"{WORKFLOW}(0).root(0).{task}(0).executor(0)")
    return [
        node(f"{task}-driver", "SUCCEEDED"),
        node(task, state),
        node(f"{task}(0)", state),
        node("executor", state, executor),
        node("executor(0)", state),
    ]


def pod_of(task: str) -> str:
    """The pod of `task_nodes`."""
    number = node_id(WORKFLOW, f"{WORKFLOW}(0).root(0).{task}(0).executor(0)").rpartition("-")[2]
    return f"{WORKFLOW}-system-container-impl-{number}"


def run(state: str, nodes: list[dict[str, Any]], error: str = "") -> dict[str, Any]:
    """A run as the API tells it."""
    attempts = [node(f"{WORKFLOW}(0)", state), node("root(0)", state)]
    told: dict[str, Any] = {
        "run_id": RUN_ID,
        "state": state,
        "run_details": {"task_details": [*attempts, *nodes]},
    }
    return {**told, "error": {"code": 13, "message": error}} if error else told


@dataclass
class Api:
    """What the server answers, and what it was asked.

    runs: what each request for the run is answered with, the last one again and again. logs: by pod.
    overrides: instead of all that, by the beginning of "METHOD /path".
    """

    multi_user: bool = False
    experiments: dict[str, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    overrides: dict[str, Answer | Callable[[], Answer]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    host: str = ""

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
            return 200, self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        if path.startswith(f"/apis/v1alpha1/runs/{RUN_ID}/nodes/"):
            text = self.logs.get(path.split("/")[-2])
            return (200, text.encode()) if text is not None else (500, {"error_message": "no such pod"})
        if path == "/artifacts/get":
            return 200, self.artifacts[f"{query['source']}://{query['bucket']}/{query['key']}"]
        return 404, {"error": "Not Found", "code": 5, "message": "Not Found"}

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
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.host = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
