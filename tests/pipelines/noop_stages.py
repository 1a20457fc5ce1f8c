"""Stages that do almost nothing, or go wrong in every way there is: for the tests of the executor."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Literal

from hpml.artifacts.folder import Artifact
from hpml.core.contract import Config, Output, Result
from hpml.core.errors import GateFailed, StageFailed


class NumberSpec(Config):
    kind: Literal["report"] = "report"  # any kind that artifacts.SPECS knows
    title: str


class Number(Config):
    value: int = 0
    failure: str = ""
    nap_s: float = 0.0
    tag: str = ""

    @property
    def label(self) -> str:
        return self.tag


def _fail(kind: str) -> None:
    match kind:
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "import":
            importlib.import_module("no_such_package")
        case "bug":
            raise ZeroDivisionError("of a bug")
        case "stage":
            raise StageFailed("it broke", why="a reason", fix="a remedy")
        case "gate":
            raise GateFailed("too slow")
        case "disk":
            raise OSError(28, "No space left on device")
        case "hungry":
            eaten = []
            while True:
                eaten.append(bytearray(b"x" * 10_000_000))
        case "orphan":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def start(config: Number, *, out: Output) -> Result[NumberSpec]:
    """Deliver a number."""
    _fail(config.failure)
    time.sleep(config.nap_s)
    (out.path / "number").write_text(str(config.value))
    out.metric("value", config.value, index=1)
    return Result(
        NumberSpec(title=str(config.value)),
        {"value": config.value},
        rejected="no good" if config.failure == "rejected" else "",
    )


def add(
    config: Number, *, first: Artifact[NumberSpec], others: dict[str, Artifact[NumberSpec]], out: Output
) -> Result[NumberSpec]:
    """Deliver the sum of numbers and of the config's."""
    _fail(config.failure)
    time.sleep(config.nap_s)
    numbers = [int(item.file("number").read_text()) for item in (first, *others.values())]
    total = sum(numbers) + config.value
    (out.path / "number").write_text(str(total))
    return Result(NumberSpec(title=str(total)))


def show(
    config: Number,
    *,
    others: dict[str, Artifact[NumberSpec]],
    wished: Artifact[NumberSpec] | None = None,
    out: Output,
) -> Result[NumberSpec]:
    """Deliver what is there and what is not."""
    _fail(config.failure)
    seen = {"there": sorted(others), "wished": wished is not None, "left_out": dict(out.left_out)}
    (out.path / "number").write_text(json.dumps(seen))
    return Result(NumberSpec(title="shown"))


class Rounds(Number):
    needed: int = 2
    require_quiet: bool = False


def benchmark(config: Rounds, *, first: Artifact[NumberSpec], out: Output) -> Result[NumberSpec]:
    """Do one of the rounds that are needed; those of attempts before are in the scratch."""
    kept = out.scratch / "checkpoints-rounds"
    kept.mkdir(exist_ok=True)
    (kept / f"{len(list(kept.iterdir()))}.json").write_text("{}")
    rounds = len(list(kept.iterdir()))
    (out.path / "number").write_text(str(rounds))
    missing = f"{rounds} of {config.needed} rounds" if rounds < config.needed else ""
    refused = missing if config.require_quiet else ""
    return Result(NumberSpec(title=f"{rounds} rounds"), rejected=refused, incomplete=missing)


def alone(config: Number, *, first: Artifact[NumberSpec], out: Output) -> Result[NumberSpec]:
    """Write when it ran."""
    begun_s = time.monotonic()
    time.sleep(config.nap_s)
    (out.path / "number").write_text(json.dumps([begun_s, time.monotonic()]))
    return Result(NumberSpec(title=config.tag))


class Timed(Number):
    @property
    def decides_by_timing(self) -> bool:
        return True
