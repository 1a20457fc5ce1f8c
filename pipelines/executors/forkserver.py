"""Runs each step in a forked process of its own: isolated like a fresh interpreter, started in milliseconds.

The server is a small process beside the engine. It imports what several steps need once (torch takes a
second), then forks for each job. A forked job is the leader of its own session: whatever happens to it
(a segfault, the kernel's out-of-memory killer, `os._exit`) ends that step only, and when it ends, everything
it started ends with it. When the engine goes away, however it goes, the server ends the jobs and itself.

Messages are JSON over a pair of connections. To the server: {"preload": [module, ...]}, {"job": id, "call":
"module:function", "argument": {...}, "log": path}, {"signal": number, "job": id}. From the server: {"job":
id, "status": wait status, "peak_rss_bytes": n}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
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
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpml.pipelines.executors.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine, which then asks the jobs to stop
        )
        theirs.close()
        self._jobs = 0

    def preload(self, modules: tuple[str, ...]) -> None:
        """Import `modules` in the server as soon as it has nothing else to do."""
        _send(self._connection, {"preload": list(modules)})

    def start(self, call: str, argument: dict[str, Any], log: Path) -> int:
        """Fork a process that calls `call(**argument)` with its output in `log`; returns the job's number.

        What the function returns, None or a number, is the exit status of the process.
        """
        self._jobs += 1
        message = {"job": self._jobs, "call": call, "argument": argument, "log": str(log)}
        _send(self._connection, message)
        return self._jobs

    def signal(self, job: int, number: signal.Signals) -> None:
        """Send a signal to the process of a job (not to what it started)."""
        with contextlib.suppress(OSError):
            _send(self._connection, {"signal": int(number), "job": job})

    def ended(self, timeout_s: float) -> list[ProcessExit]:
        """The next job that ended, waiting at most `timeout_s` for it; none if none did.

        Raises ConnectionError if the server itself is gone.
        """
        if not self._connection.poll(timeout_s):
            return []
        return [ProcessExit(**_receive(self._connection))]

    def close(self) -> None:
        """End the server and whatever still runs in it, and wait until it is gone."""
        self._connection.close()
        self._process.wait()


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except EOFError:
        raise ConnectionError("the fork server is gone") from None
    return message


# ------------------------------------------------------------------------------------------------ the server


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: dict[int, tuple[int, int]] = {}  # file descriptor of a process -> job, pid
        self._to_preload: list[str] = []

    def serve(self) -> None:
        """Fork and reap until the engine closes its end."""
        try:
            while True:
                for ready in wait([self._connection, *self._jobs], 0 if self._to_preload else None):
                    if isinstance(ready, int):
                        self._reap(ready)
                    else:
                        self._handle(_receive(self._connection))
                if self._to_preload and not self._connection.poll():
                    self._preload(self._to_preload.pop(0))
        except (ConnectionError, KeyboardInterrupt):
            self._end_all()

    def _preload(self, module: str) -> None:
        with contextlib.suppress(ImportError):  # the job that needs it will say so
            importlib.import_module(module)
        gc.freeze()  # keeps the pages of what is loaded shared with the forks

    def _handle(self, message: dict[str, Any]) -> None:
        if "preload" in message:
            self._to_preload += [name for name in message["preload"] if name not in sys.modules]
        elif "call" in message:
            self._fork(message)
        else:
            for job, pid in self._jobs.values():
                if job == message["job"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, message["signal"])

    def _fork(self, message: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_job(message, server)
        self._jobs[os.pidfd_open(pid)] = message["job"], pid

    def _reap(self, descriptor: int) -> None:
        job, pid = self._jobs.pop(descriptor)
        os.close(descriptor)
        _, status, usage = os.wait4(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the step started and left behind
        ended = {"job": job, "status": status, "peak_rss_bytes": usage.ru_maxrss * 1024}
        with contextlib.suppress(OSError):
            _send(self._connection, ended)

    def _end_all(self) -> None:
        """SIGTERM, a time of grace to save a checkpoint, SIGKILL for the whole group."""
        for _, pid in self._jobs.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline, running = time.monotonic() + _GRACE_S, set(self._jobs)
        while running and (left_s := deadline - time.monotonic()) > 0:
            running.difference_update(wait(running, left_s))
        for _, pid in self._jobs.values():
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
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    _Server(Connection(descriptor)).serve()
