"""Training in processes of their own, to be stopped and killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.__main__ import Job, run_job
from hpml.components.train.config import TrainConfig

# A server that has torch loaded and forks for each attempt, so that twenty of them cost one import (the
# first optimizer of a process imports torch._dynamo, nearly a second).
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["hpml.components.train.local", "torch._dynamo"])


@dataclass
class Attempt:
    """One process that trains, as the executor starts it."""

    process: ForkServerProcess
    events: Path
    log: Path
    scratch: Path

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.scratch.glob("checkpoints-*/*.safetensors"))

    def said(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        text = self.events.read_text() if self.events.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in lines if line["event"] == kind]

    def wait_until(self, happened: Callable[[], object]) -> None:
        """Returns early if the process ends."""
        until = time.monotonic() + 120
        while self.process.is_alive() and not happened():
            assert time.monotonic() < until
            time.sleep(0.005)

    def wait_for_a_checkpoint(self) -> None:
        known = set(self.checkpoints())
        self.wait_until(lambda: set(self.checkpoints()) - known)

    def wait_for_progress(self) -> None:
        self.wait_until(lambda: self.said("progress"))

    def send(self, number: signal.Signals) -> int | None:
        """The exit code after a signal."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)
        return self.exit_code()

    def exit_code(self) -> int | None:
        self.process.join()
        return self.process.exitcode


@dataclass
class Trainer:
    """Starts attempts at one training; they share a scratch folder, as attempts at one step do."""

    root: Path
    data: Artifact[DatasetSpec]
    config: TrainConfig
    threads: int
    attempts: int = 0

    def start(self) -> Attempt:
        self.attempts += 1
        events = self.root / f"events-{self.attempts}.jsonl"
        log = self.root / f"log-{self.attempts}.txt"
        job = Job(
            run="hpml.components.train.stage:run",
            config=self.config.model_dump(mode="json"),
            inputs={"data": str(self.data.path)},
            out=str(self.root / "model"),
            scratch=str(self.root / "scratch"),
            events=str(events),
            threads=self.threads,
        )
        process = FORKING.Process(target=_run_with_log, args=(log, asdict(job)))
        process.start()
        return Attempt(process, events, log, self.root / "scratch")

    def finish(self) -> Attempt:
        attempt = self.start()
        assert attempt.exit_code() == 0, attempt.log.read_text()
        return attempt

    @property
    def weights(self) -> bytes:
        return (self.root / "model" / "model.safetensors").read_bytes()

    @property
    def history(self) -> Any:
        return json.loads((self.root / "model" / "history.json").read_text())


def _run_with_log(log: Path, job: dict[str, Any]) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run_job(**job)
