"""What the engine asks of an executor: processes of this machine, containers, Jobs of a cluster."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpml.artifacts.folder import Artifact, Manifest
from hpml.pipelines.engine.cache_keys import CacheKeyInputs, RuntimeEnvironment
from hpml.pipelines.engine.run_record import StepRecord
from hpml.pipelines.plan import Node, Plan


class Watcher(Protocol):
    """Who is told what happens, such as the terminal."""

    def step_changed(self, name: str, record: StepRecord) -> None:
        """A step has another status."""

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        """A running step reported progress; see contract.Output.progress."""

    def say(self, text: str) -> None:
        """Something the user should know."""


class ArtifactStore(Protocol):
    """Artifacts by content, and which key led to which; pipelines/engine/store.py has the one on a disk."""

    def in_use(self) -> AbstractContextManager[None]:
        """Keep what is stored meanwhile."""

    def lookup(self, key: str) -> str | None:
        """The content digest that `key` led to, if that artifact is still whole and not incomplete."""

    def incomplete(self, key: str) -> str:
        """What is missing in the artifact that `key` led to, and why; empty if nothing is."""

    def last_key_inputs(self, step: str) -> CacheKeyInputs | None:
        """What the newest result of a step of this name was made of."""

    def location(self, digest: str) -> str:
        """The path or URI that a step reads the artifact from."""

    def incoming(self, step: str) -> str:
        """A fresh path or URI for a step to deliver its artifact to."""

    def accept(self, delivered: str, key: str, key_inputs: CacheKeyInputs, step: str) -> str:
        """Remember that `key` leads to what was delivered; returns its content digest."""

    def keep_rejected(self, delivered: str, folder: Path) -> bool:
        """Bring what a gate refused to `folder`, for a look; returns whether there was anything."""

    def manifest(self, digest: str) -> Manifest:
        """The manifest of the artifact with this content digest, wherever that is."""

    def open(self, digest: str) -> Artifact[Any]:
        """The artifact with this content digest, verified, on this machine's disk."""

    def scratch(self, key: str) -> str:
        """The path or URI of a folder that outlives failed and incomplete attempts at `key`."""

    def try_begin(self, key: str, *, alone: bool) -> ExitStack | None:
        """The right to compute `key`, and a share in the use of the machine, or all of it.

        It is held until it is closed. None if other runs have one of them.
        """


@dataclass(frozen=True)
class StepExit:
    """How a step's process ended.

    exit_code: 128 + n if signal n ended it. cause: what the executor knows about a failure that the step
    could not explain itself, such as that it was killed for lack of memory.
    """

    job: int
    exit_code: int
    peak_rss_bytes: int = 0
    cause: str = ""


class Executor(Protocol):
    """Where the steps of one run are executed.

    cpus: how many the engine shares out among steps; None where the executor does that itself.
    tracks: whether steps report to MLflow themselves, so that the engine does not.
    """

    @property
    def cpus(self) -> int | None: ...

    @property
    def tracks(self) -> bool: ...

    @property
    def store(self) -> ArtifactStore: ...

    def runtime_environment(self, stage: str) -> RuntimeEnvironment:
        """What a step of `stage` would find here. Raises HpmlError if that cannot be learned."""

    def threads(self, stage: str) -> int:
        """How many threads a step of `stage` may use."""

    def check(self, plan: Plan) -> None:
        """Refuse, before anything is started, a plan that cannot run here. Raises HpmlError."""

    def prepare(self, waiting: tuple[Node, ...]) -> None:
        """Get ready, while other steps run, for those that are still to come."""

    def start(self, node: Node, job: dict[str, Any], log: Path) -> int:
        """Start a step with its output in `log`; returns a number for it.

        job: the fields of hpml.components.__main__.Job; its events are to arrive in the file `events`.
        """

    def signal(self, job: int, number: signal.Signals) -> None:
        """SIGTERM asks a step to save and stop, SIGKILL does not ask."""

    def ended(self, timeout_s: float) -> list[StepExit]:
        """The steps that ended, waiting at most `timeout_s` for the first."""

    def close(self, status: str) -> None:
        """Release everything; the run ended with `status`."""
