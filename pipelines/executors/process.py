"""Steps as isolated processes of this machine, forked by a server that has torch loaded."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from hpml.core import cgroup, hardware
from hpml.core.errors import StageFailed, disk_full
from hpml.pipelines.engine import cache_keys
from hpml.pipelines.engine.cache_keys import RuntimeEnvironment
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.base import StepExit
from hpml.pipelines.executors.forkserver import ForkServer, ProcessExit
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.preflight import checks as preflight
from hpml.pipelines.stage_needs import needs_of


class LocalSteps(ABC):
    """Steps of this machine, each held by a process that a fork server starts."""

    tracks = False

    def __init__(self, home: Path) -> None:
        self.store = Store(home)
        self.cpus = hardware.usable_cpus()
        self._server: ForkServer | None = None  # started when the first step needs it

    def threads(self, stage: str) -> int:
        """As the stage's `needs.py` says, and no more than there are CPUs."""
        return min(needs_of(stage).cpus or self.cpus, self.cpus)

    def signal(self, job: int, number: signal.Signals) -> None:
        """Send it."""
        if self._server:
            self._server.signal(job, number)

    def ended(self, timeout_s: float) -> list[StepExit]:
        """Those that ended."""
        assert self._server, "something was started"
        return [self._understood(end) for end in self._server.ended(timeout_s)]

    @abstractmethod
    def _understood(self, end: ProcessExit) -> StepExit: ...

    def close(self, status: str) -> None:
        """End whatever still runs."""
        if self._server:
            self._server.close()


class Processes(LocalSteps):
    """Steps as processes."""

    def __init__(self, home: Path, *, registry_uri: str = "") -> None:
        super().__init__(home)
        self._registry_uri = registry_uri
        self._runtime_environment = cache_keys.here()
        self._preloaded: set[str] = set()
        self._oom_kills_before: dict[int, int] = {}

    def runtime_environment(self, stage: str) -> RuntimeEnvironment:
        """That of this process, as it was when the run began."""
        return self._runtime_environment

    def check(self, plan: Plan) -> None:
        """Ask every step whether this machine can run it. Raises ConfigInvalid with all reasons."""
        preflight.refuse(preflight.unsupported_reason(plan))

    def prepare(self, waiting: tuple[Node, ...]) -> None:
        """Have the server import what the steps that are still to come will need."""
        modules = {name for node in waiting for name in needs_of(node.stage).preload}
        if self._server and modules - self._preloaded:
            self._server.preload(tuple(sorted(modules - self._preloaded)))
            self._preloaded |= modules

    def start(self, node: Node, job: dict[str, Any], log: Path) -> int:
        """Fork a process."""
        if self._server is None:
            os.environ["MLFLOW_TRACKING_URI"] = self._registry_uri
            self._server = ForkServer()
        number = self._server.start("hpml.components.__main__:run_job", job, log)
        self._oom_kills_before[number] = _oom_kills()
        return number

    def _understood(self, end: ProcessExit) -> StepExit:
        before = self._oom_kills_before.pop(end.job)
        if os.WIFSIGNALED(end.status):
            number = os.WTERMSIG(end.status)
            name = signal.Signals(number).name
            cause = f"its process was killed by {name} ({signal.strsignal(number)})"
            if number == signal.SIGKILL and _oom_kills() > before:
                cause = (
                    f"the kernel killed it for lack of memory at {end.peak_rss_bytes / 1e9:.1f} GB"
                    " -> use a smaller batch or model, or a machine with more memory"
                )
            return StepExit(end.job, 128 + number, end.peak_rss_bytes, cause)
        status = os.waitstatus_to_exitcode(end.status)
        cause = f"its process ended with status {status} without saying why" if status else ""
        full = disk_full(StageFailed(cause), self.store.root)  # then it had no room to say so
        return StepExit(end.job, status, end.peak_rss_bytes, str(full) if full else cause)


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, in our group or on this machine."""
    in_group = cgroup.oom_kills()
    if in_group is not None:
        return in_group
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0
