"""The stage's end of a worker: an engine in a fresh process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import components
from components.errors import ExitCode, StageFailed

REPLY_LIMIT_S = 900.0


class EngineProcess:
    """A process for one engine. Use it as a context: on the way out the process is killed and reaped.

    name: the engine's, for messages. log: where the process writes its stdout and stderr.
    """

    def __init__(self, name: str, log: Path, *, reply_limit_s: float = REPLY_LIMIT_S) -> None:
        self.name, self._log, self._reply_limit_s = name, log, reply_limit_s
        self._doing = "starting"
        self._channel, far_end = multiprocessing.Pipe()
        with far_end, log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "components.benchmark.worker",
                    str(far_end.fileno()),
                    str(os.getpid()),
                ],
                cwd=Path(components.__file__).parents[1],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, do: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its result; see `send` and `receive`."""
        self.send(do, doing, **arguments)
        return self.receive()

    def send(self, do: str, doing: str, **arguments: Any) -> None:
        """Send a request without waiting. `doing` says in a message what the process was at."""
        self._doing = doing
        try:
            self._channel.send_bytes(json.dumps({"do": do, "arguments": arguments}).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self._failed(self._cause_of_death()) from None

    def receive(self) -> dict[str, Any]:
        """The result of the request sent last.

        Raises StageFailed that names the engine if it reports an error, dies, or does not answer in time;
        with the exit code of what it reports (a server that went away is unavailable).
        """
        try:
            if not self._channel.poll(self._reply_limit_s):
                raise self._failed(f"it did not answer for {self._reply_limit_s:g} s")
            reply = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._failed(self._cause_of_death()) from None
        if "error" in reply:
            failure = self._failed(reply["error"])
            failure.exit_code = ExitCode(reply.get("exit_code", ExitCode.STAGE_FAILED))
            raise failure
        result: dict[str, Any] = reply["result"]
        return result

    def _failed(self, why: str) -> StageFailed:
        return StageFailed(f"the engine {self.name!r} failed while {self._doing}", why=why)

    def _cause_of_death(self) -> str:
        status = self._process.wait()
        if status < 0:
            cause = f"its process was killed by {signal.Signals(-status).name}"
        else:
            cause = f"its process ended with status {status}"
        if status == -signal.SIGKILL:
            cause += ", which is also how the kernel ends a process when memory runs out"
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{cause}; it said last: {last[:300]}" if last else cause
