"""The stage's end of a worker: an engine in a fresh process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import hpml
from hpml.core import hardware, memory
from hpml.core.errors import ExitCode, StageFailed
from hpml.core.process import users_environment

REPLY_LIMIT_S = 900.0
GRACE_S = 60.0  # beyond a time budget, for one answer: loading a large engine, importing its libraries
_SHARE_OF_MEMORY = 0.8  # of what is available when the process starts; the rest is for the machine
# How Python, C++, ONNX Runtime and torch say that there is no more memory.
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "Failed to allocate memory", "not enough memory")


class EngineProcess:
    """A process for one engine. Use it as a context: on the way out the process is killed and reaped.

    name: the engine's, for messages. log: where the process writes its stdout and stderr. reply_limit_s: what
    one answer may take. worker: the module that it runs. tells_all: its errors for users say what failed,
    which need not be the engine, so nothing goes in front of them. sleeps: it is stopped (SIGSTOP) while it
    has no request. The threads of ONNX Runtime's pools spin for 20 to 40 ms after their last request, those
    of OpenMP for some ms: they would take a CPU from the engine whose turn is next.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        *,
        reply_limit_s: float = REPLY_LIMIT_S,
        worker: str = "hpml.measuring.process.worker",
        tells_all: bool = False,
        sleeps: bool = False,
    ) -> None:
        self._tells_all, self._sleeps = tells_all, sleeps
        self.name, self._log, self._reply_limit_s = name, log, reply_limit_s
        # A GPU's driver maps more memory than it uses.
        self._memory_bytes = 0 if hardware.gpu_names() else int(_SHARE_OF_MEMORY * memory.available_bytes())
        self._doing = "starting"
        self._channel, far_end = multiprocessing.Pipe()
        with far_end, log.open("wb") as output:
            numbers = far_end.fileno(), os.getpid(), self._memory_bytes
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker, *map(str, numbers)],
                cwd=Path(hpml.__file__).parents[1],
                env=users_environment(),
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
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
        if self._sleeps:
            self._process.send_signal(signal.SIGCONT)
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
                raise self._failed(
                    f"it did not answer within its limit of {self._reply_limit_s:g} s and was stopped",
                    fix="give it more time (--budget-s, --limit-s) if it is only slow",
                )
            reply = json.loads(self._channel.recv_bytes())
            if self._sleeps:
                self._fall_asleep()
        except (EOFError, ConnectionResetError):
            raise self._failed(self._cause_of_death()) from None
        if "error" in reply:
            why = reply["error"] + self._memory_in_words(reply["error"])
            as_it_is = self._tells_all and "exit_code" in reply
            failure = StageFailed(why) if as_it_is else self._failed(why)
            failure.exit_code = ExitCode(reply.get("exit_code", ExitCode.STAGE_FAILED))
            raise failure
        result: dict[str, Any] = reply["result"]
        return result

    def _fall_asleep(self) -> None:
        """Stop all threads of the process; they have stopped when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        with suppress(ChildProcessError):  # it has ended; the next request says so
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _failed(self, why: str, fix: str = "") -> StageFailed:
        return StageFailed(f"the engine {self.name!r} failed while {self._doing}", why=why, fix=fix)

    def _memory_in_words(self, why: str) -> str:
        """The memory that the process had, where what it said is that it got no more."""
        if not self._memory_bytes or not any(sign in why for sign in _OUT_OF_MEMORY):
            return ""
        return f" (its process may take {self._memory_bytes / 1e9:.3g} GB)"

    def _cause_of_death(self) -> str:
        status = self._process.wait()
        ended = (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        )
        cause = f"its process {ended}"
        if status == -signal.SIGKILL:
            cause += ", which is also how the kernel ends a process when memory runs out"
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        said = f"{cause}; it said last: {last[:300]}" if last else cause
        return said + self._memory_in_words(last)
