"""Runs each step in a forked process of its own: isolated like a fresh interpreter, started in milliseconds.

The server is a small process beside the engine. It imports what several steps need once (torch takes a
second), then forks for each job. A forked job is the leader of its own session: whatever happens to it
(a segfault, the kernel's out-of-memory killer, `os._exit`) ends that step only, and when it ends, everything
it started ends with it. When the engine goes away, however it goes, the server ends the jobs and itself.

Messages are JSON lines over a socket pair. To the server: {"preload": [module, ...]}, {"job": id, "call":
"module:function", "argument": {...}, "log": path}, {"signal": number, "job": id}. From the server: {"job":
id, "status": wait status, "peak_rss_bytes": n}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.core.process import die_with_parent, spin_briefly

_GRACE_S = 15.0  # a training step has 10 s to save after SIGTERM


@dataclass(frozen=True)
class ProcessExit:
    """How a job ended: the wait status of its process, and the largest resident set among its processes."""

    job: int
    status: int
    peak_rss_bytes: int


class ForkServer:
    """The engine's end."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpml.pipelines.executors.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine, which then asks the jobs to stop
        )
        theirs.close()
        self._lines = _Lines(self._socket)
        self._jobs = 0

    def preload(self, modules: tuple[str, ...]) -> None:
        """Import `modules` in the server as soon as it has nothing else to do."""
        self._send({"preload": list(modules)})

    def start(self, call: str, argument: dict[str, Any], log: Path) -> int:
        """Fork a process that calls `call(**argument)` with its output in `log`; returns the job's number.

        What the function returns, None or a number, is the exit status of the process.
        """
        self._jobs += 1
        self._send({"job": self._jobs, "call": call, "argument": argument, "log": str(log)})
        return self._jobs

    def signal(self, job: int, number: signal.Signals) -> None:
        """Send a signal to the process of a job (not to what it started)."""
        with contextlib.suppress(OSError):
            self._send({"signal": int(number), "job": job})

    def ended(self, timeout_s: float) -> list[ProcessExit]:
        """The jobs that ended, waiting at most `timeout_s` for the first.

        Raises ConnectionError if the server itself is gone.
        """
        self._socket.settimeout(timeout_s)
        return [ProcessExit(**message) for message in self._lines.receive()]

    def close(self) -> None:
        """End the server and whatever still runs in it, and wait until it is gone."""
        self._socket.close()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.settimeout(None)
        self._socket.sendall(json.dumps(message).encode() + b"\n")


class _Lines:
    """JSON lines of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def receive(self) -> list[Any]:
        """The whole lines that one read brings; none if the socket's timeout passes.

        Raises ConnectionError at the end of the stream.
        """
        try:
            data = self._connection.recv(65536)
        except TimeoutError:
            return []
        if not data:
            raise ConnectionError("the fork server is gone")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------------------ the server


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = _Lines(connection)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # job -> pid
        self._to_preload: list[str] = []

    def serve(self) -> None:
        """Fork and reap until the engine closes its end."""
        try:
            while True:
                for key, _ in self._selector.select(0 if self._to_preload else None):
                    if key.fileobj is self._connection:
                        for message in self._lines.receive():
                            self._handle(message)
                    else:
                        self._reap(key.data)
                if self._to_preload and not self._has_mail():
                    self._preload(self._to_preload.pop(0))
        except (ConnectionError, KeyboardInterrupt):
            self._end_all()

    def _has_mail(self) -> bool:
        return any(key.fileobj is self._connection for key, _ in self._selector.select(0))

    def _preload(self, module: str) -> None:
        with contextlib.suppress(ImportError):  # the job that needs it will say so
            importlib.import_module(module)
        gc.freeze()  # keeps the pages of what is loaded shared with the forks

    def _handle(self, message: dict[str, Any]) -> None:
        if "preload" in message:
            self._to_preload += [name for name in message["preload"] if name not in sys.modules]
        elif "call" in message:
            self._fork(message)
        elif message["job"] in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[message["job"]], message["signal"])

    def _fork(self, message: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_job(message, server)
        self._pids[message["job"]] = pid
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=message["job"])

    def _reap(self, job: int) -> None:
        pid = self._pids.pop(job)
        _, status, usage = os.wait4(pid, 0)
        for key in list(self._selector.get_map().values()):
            if key.data == job:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the step started and left behind
        ended = {"job": job, "status": status, "peak_rss_bytes": usage.ru_maxrss * 1024}
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(ended).encode() + b"\n")

    def _end_all(self) -> None:
        """SIGTERM, a time of grace to save a checkpoint, SIGKILL for the whole group."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        waiting = set(self._pids.values())
        while waiting and time.monotonic() < deadline:
            waiting = {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.02)
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _become_job(message: dict[str, Any], server: int) -> None:
    """In the forked process: a session and a log of its own, then the call. Never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(server, signal.SIGTERM)
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        module, _, function = message["call"].partition(":")
        status = getattr(importlib.import_module(module), function)(**message["argument"]) or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when the engine's end closes, in order
    spin_briefly()
    importlib.import_module("hpml.components.__main__")
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _Server(connection).serve()
