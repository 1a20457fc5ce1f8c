"""A conversation with an engine, line by line."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, Artifact, open_artifact, read_manifest
from hpml.core import hardware
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, StageFailed, UsageError
from hpml.measuring.subjects import BundleSubject
from hpml.measuring.subjects.bundle import BUNDLE
from hpml.pipelines.bench.measurable import engine_of_run
from hpml.targets import AnyTarget
from hpml.tasks import TASKS, Task, task_of
from hpml.tasks.base import Runs

_KINDS = "the id of a run, RUN:VARIANT such as latest:int8/onnx, or the folder of an engine or of a bundle"


@dataclass(frozen=True)
class Partner:
    """Who is talked to: an engine, what it knows of texts, and the folder of its files."""

    task: Task
    runs: Runs
    folder: Path


def partner(argument: str, home: Path) -> Partner:
    """The engine that `argument` names.

    Raises UsageError if it names none, StageFailed if it was not built or is damaged.
    """
    path = Path(argument)
    if (path / BUNDLE).is_file():
        bundle = BundleSubject(folder=path.resolve())
        task = _talker(argument, bundle.facts().engine)
        _, runs = bundle.load(threads=hardware.usable_cores())
        return Partner(task, runs, bundle.engine_folder)
    if (path / MANIFEST).is_file():
        kind = read_manifest(path).kind
        if kind != "engine":
            raise UsageError(f"{argument} cannot talk", why=f"it is a {kind}", fix=f"give {_KINDS}")
        return _of_engine(argument, open_artifact(path, kind="engine"))
    if path.is_dir():
        why = f"the folder has neither {BUNDLE} nor {MANIFEST}"
        raise UsageError(f"{argument} cannot talk", why=why, fix=f"give {_KINDS}")
    run, _, name = argument.partition(":")
    if "/" in run:
        raise UsageError(f"there is no folder {argument}", fix=f"give {_KINDS}")
    engine, import_paths = engine_of_run(home, run, name)
    sys.path[:0] = import_paths  # of the user's own networks
    return _of_engine(argument, engine)


def _of_engine(argument: str, engine: Artifact[EngineSpec]) -> Partner:
    if engine.spec.status != "built":
        raise StageFailed(f"the engine in {engine.path} was not built", why=engine.spec.reason)
    task = _talker(argument, engine.spec)
    target: AnyTarget = validate(AnyTarget, engine.spec.target, where="the target of the engine")
    runs = target.load(engine.path, engine.spec, threads=hardware.usable_cores())
    return Partner(task, runs, engine.path)


def _talker(argument: str, engine: EngineSpec) -> Task:
    """The task of an engine. Raises UsageError if it does not talk, or is a user's own that is not here."""
    why = f"its task is {engine.task.get('task')}"
    try:
        task = task_of(engine.task)
        if type(task).reply is not Task.reply:
            return task
    except ConfigInvalid as error:
        why += f", a user's own; {error.what}, {error.why}"
    talking = [name for name, kind in TASKS.items() if kind.talks]
    raise UsageError(f"{argument} does not talk", why=why, fix=f"give one of {' or '.join(talking)}")


def talk(partner: Partner, *, beams: int, max_tokens: int) -> None:
    """Answer each line of stdin with a line on stdout; at a terminal with a prompt, until Ctrl-D."""
    said: list[str] = []
    for line in _lines():
        said.append(line)
        answer = partner.task.reply(partner.runs, partner.folder, said, beams=beams, max_tokens=max_tokens)
        said.append(answer)
        print(_printable(answer), flush=True)


def _lines() -> Iterator[str]:
    """What is said, line by line; a blank line is none."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # whatever a pipe brings is text
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _printable(text: str) -> str:
    """Without what could move the cursor or change the terminal's state."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
