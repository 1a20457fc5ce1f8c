"""A server of this machine that behaves as the Hugging Face hub does to who downloads a repository."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Its address, the repositories that it has at COMMIT, which of them are gated, and what it was asked."""

    address: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if path.startswith("/api/models/"):
                name, _, rest = path.removeprefix("/api/models/").partition("/tree/")
            else:
                name, _, rest = path.removeprefix("/").partition("/resolve/")
            folder = hub.repositories.get(name)
            commit, _, file = rest.partition("/")
            if folder is None:
                self._send(404, {"X-Error-Code": "RepoNotFound"})
            elif commit != COMMIT:
                self._send(404, {"X-Error-Code": "RevisionNotFound"})
            elif path.startswith("/api/models/"):
                files = [
                    {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "0" * 40}
                    for one in sorted(folder.iterdir())
                ]
                self._send(200, {}, json.dumps(files).encode())
            elif name in hub.gated:
                self._send(403, {"X-Error-Code": "GatedRepo"})
            elif not (folder / file).is_file():
                self._send(404, {"X-Error-Code": "EntryNotFound"})
            else:
                content = (folder / file).read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                self._send(200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content)

        def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()
