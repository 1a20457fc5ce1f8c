"""A small API server of Kubernetes for tests: objects, selectors, logs that are followed, and outages."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
TOKEN = "secret-of-the-test"

_PATH = re.compile(
    r"/apis?/(?P<api>(?:[\w.-]+/)?v\w+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[\w]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)


class FakeCluster:
    """The objects of one namespace, by plural and name, and the lines of the logs of its pods.

    Those of another namespace are there by the name NAMESPACE/NAME, to be read.

    at_once: called with each new object before its maker is answered, which sees nothing of the time before.
    on_create: called with it after that, in a thread: where a test plays controller. refuse: answers a
    request (verb, plural) instead of us, with a status and a message. outage: while set, connections are cut.
    cut_log_after: how many lines each stream of a log has, the last one broken off; None for no limit.
    """

    def __init__(
        self, namespace: str = "hpml", plurals: tuple[str, ...] = ("pods", "events", "pytorchjobs")
    ) -> None:
        self.namespace, self.plurals = namespace, plurals
        self.objects: dict[tuple[str, str], Json] = {}
        self.requests: list[str] = []  # "VERB plural/name"
        self.at_once: Callable[[Json], None] = lambda item: None
        self.on_create: Callable[[Json], None] = lambda item: None
        self.refuse: Callable[[str, str], tuple[int, str] | None] = lambda verb, plural: None
        self.outage = threading.Event()
        self.cut_log_after: int | None = None
        self._logs: dict[str, list[tuple[str, str]]] = {}  # by the uid of the pod, (time, line)
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, file: Path) -> Path:
        """Write `file`, which names this cluster."""
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                    "users": [{"name": "test", "user": {"token": TOKEN}}],
                }
            )
        )
        return file

    # ------------------------------------------------------------------------------------- what a test does

    def add(self, plural: str, item: Json) -> Json:
        """A new object, with an uid."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._lock:
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now}
            item = {**item, "metadata": {**item["metadata"], **metadata}}
            self.objects[plural, item["metadata"]["name"]] = item
            return item

    def add_pod(
        self, name: str, labels: dict[str, str] | None = None, container: str = "pytorch", **status: Any
    ) -> Json:
        """A new pod that is Pending, or as `status` says."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": container, "resources": {"limits": {"memory": "1Gi"}}}],
            },
            "status": {"phase": "Pending", **status},
        }
        return self.add("pods", pod)

    def set_state(self, pod: Json, phase: str, container: str = "pytorch", /, **state: Json) -> None:
        """Change a pod, such as set_state(pod, "Running", running={})."""
        with self._lock:
            pod["status"] = {
                **pod["status"],
                "phase": phase,
                "containerStatuses": [{"name": container, "image": "the/image:1", "state": state}],
            }

    def add_event(self, about: Json, reason: str, message: str, kind: str = "Warning") -> None:
        number = len(self.objects)
        self.add(
            "events",
            {
                "metadata": {"name": f"event-{number}"},
                "involvedObject": {"uid": about["metadata"]["uid"]},
                "reason": reason,
                "message": message,
                "type": kind,
                "lastTimestamp": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z",
            },
        )

    def log(self, pod: Json, *lines: str, at: str = "") -> None:
        """Append to the log of a pod. at: the time of the lines; default: now."""
        with self._lock:
            for line in lines:
                stamp = (
                    at or time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09}Z"
                )
                self._logs.setdefault(pod["metadata"]["uid"], []).append((stamp, line))

    def all(self, plural: str) -> list[Json]:
        with self._lock:
            return [item for (kind, _), item in self.objects.items() if kind == plural]

    def remove(self, plural: str, name: str) -> None:
        with self._lock:
            self.objects.pop((plural, name), None)

    # ------------------------------------------------------------------------------------------ the protocol

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are sent apart

            def log_message(self, *_: Any) -> None:
                pass

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                if cluster.outage.is_set():
                    self.close_connection = True
                    self.connection.close()
                    return
                cluster._answer(self, body)

            do_GET = do_POST = do_PATCH = do_DELETE = _do

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler, body: Json | None) -> None:
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = _PATH.fullmatch(url.path)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(request, 401, "Unauthorized", "Unauthorized")
        if not found or found["plural"] not in self.plurals:
            return self._send(request, 404, b"404 page not found", "text/plain")
        plural, name = found["plural"], found["name"] or ""
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[
            request.command
        ]
        self.requests.append(f"{verb} {plural}{found['log'] or ''}{'/' + name if name else ''}")
        if refusal := self.refuse(verb, plural + (found["log"] or "")):
            return self._refuse(
                request, refusal[0], "Forbidden" if refusal[0] == 403 else "InternalError", refusal[1]
            )
        if verb == "create" and found["namespace"] != self.namespace:
            text = f'namespaces "{found["namespace"]}" not found'
            return self._refuse(
                request, 404, "NotFound", text, {"kind": "namespaces", "name": found["namespace"]}
            )
        if verb == "list":
            return self._send_json(
                request, 200, {"items": [item for item in self.all(plural) if _chosen(item, query)]}
            )
        with self._lock:
            wanted_name = name or body["metadata"]["name"] if body else name
            if found["namespace"] != self.namespace:
                wanted_name = f"{found['namespace']}/{wanted_name}"
            item = self.objects.get((plural, wanted_name))
        if verb == "create":
            assert body
            if item:
                return self._refuse(request, 409, "AlreadyExists", f"{plural} {name} already exists")
            made = self.add(plural, body)
            self.at_once(made)
            self._send_json(request, 201, made)
            threading.Thread(target=self.on_create, args=(made,), daemon=True).start()
            return None
        if not item:
            return self._refuse(
                request, 404, "NotFound", f'{plural} "{name}" not found', {"kind": plural, "name": name}
            )
        if found["log"]:
            return self._stream_log(request, item, query)
        if verb == "patch":
            assert body
            for key, value in body.get("metadata", {}).items():
                item["metadata"][key] = value
        if verb == "delete":
            wanted = ((body or {}).get("preconditions") or {}).get("uid")
            if wanted and wanted != item["metadata"]["uid"]:
                return self._refuse(request, 409, "Conflict", "the UID in the precondition does not match")
            self.remove(plural, name)
        return self._send_json(request, 200, item)

    def _stream_log(self, request: BaseHTTPRequestHandler, pod: Json, query: dict[str, str]) -> None:
        """Lines as they come, until the pod is over or gone, or the stream is cut."""
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        since, sent, uid = query.get("sinceTime", ""), 0, pod["metadata"]["uid"]
        position = 0
        while True:
            with self._lock:
                here = self.objects.get(("pods", pod["metadata"]["name"]))
                is_over = here is not pod or pod["status"]["phase"] in ("Succeeded", "Failed")
                lines = self._logs.get(uid, [])[position:]
            for stamp, line in lines:
                position += 1
                if stamp[:19] < since[:19]:
                    continue
                if self.cut_log_after is not None and sent == self.cut_log_after:
                    half = f"{stamp} {line}"[:30].encode()
                    request.wfile.write(b"%x\r\n%s\r\n" % (len(half), half))
                    request.close_connection = True
                    request.connection.close()
                    return
                data = f"{stamp} {line}\n".encode()
                request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                sent += 1
            request.wfile.flush()
            if is_over:
                request.wfile.write(b"0\r\n\r\n")
                return
            if self.outage.is_set():
                request.close_connection = True
                request.connection.close()
                return
            time.sleep(0.02)

    def _refuse(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        reason: str,
        message: str,
        details: Json | None = None,
    ) -> None:
        told = {
            "kind": "Status",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "details": details or {},
        }
        self._send_json(request, status, told)

    def _send_json(self, request: BaseHTTPRequestHandler, status: int, body: Json) -> None:
        self._send(request, status, json.dumps(body).encode(), "application/json")

    def _send(self, request: BaseHTTPRequestHandler, status: int, data: bytes, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @contextmanager
    def serving(self) -> Iterator[FakeCluster]:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


def _chosen(item: Json, query: dict[str, str]) -> bool:
    labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
    for term in filter(None, labels.split(",")):
        key, _, value = term.partition("=")
        if item["metadata"].get("labels", {}).get(key) != value:
            return False
    for term in filter(None, fields.split(",")):
        path, _, value = term.partition("=")
        here: Any = item
        for key in path.split("."):
            here = here.get(key, {})
        if here != value:
            return False
    return True
