"""A workspace, and plans of the small stages in noop_stages.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.append(HERE)

import noop_stages  # noqa: E402

from hpml.pipelines.engine import run_record  # noqa: E402
from hpml.pipelines.engine.execution import Execution, Settings  # noqa: E402
from hpml.pipelines.engine.run_record import RunRecord, StepRecord  # noqa: E402
from hpml.pipelines.executors.process import Processes  # noqa: E402
from hpml.pipelines.plan import Plan, Step, trace  # noqa: E402


def processes() -> list[tuple[int, int, str]]:
    """The pid, parent's pid and command line of every process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            arguments = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append((int(folder.name), int(parent), arguments))
    return found


class Listener:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.said: list[str] = []

    def step_changed(self, name: str, record: StepRecord) -> None:
        self.changes.append((name, record.status))

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


def five_steps(step: Step[str], configs: Mapping[str, noop_stages.Number]) -> None:
    """a -> b, c (of a) -> d (of b, c) -> e."""

    def config(name: str) -> noop_stages.Number:
        return configs.get(name, noop_stages.Number()).model_copy(update={"tag": name})

    a = step(noop_stages.start, config("a"))
    b = step(noop_stages.add, config("b"), first=a, others={})
    c = step(noop_stages.add, config("c"), first=a, others={})
    d = step(noop_stages.add, config("d"), first=b, others={"c": c})
    step(noop_stages.add, config("e"), first=d, others={"a": a})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run_five(home: Path) -> Callable[..., RunRecord]:
    """Run the five steps: run_five(a=Number(value=3), force={"..."}, ...)."""

    def run(
        listener: Listener | None = None, force: frozenset[str] = frozenset(), **configs: Any
    ) -> RunRecord:
        plan = plan_of(**configs)
        settings = Settings(home=home, import_paths=(HERE,), force=force)
        record = run_record.start(home, run_record.new_run_id("five"), "five", "", plan)
        return Execution(plan, record, settings, listener or Listener(), Processes(home)).execute()

    return run


def plan_of(**configs: Any) -> Plan:
    return trace(lambda step, _: five_steps(step, configs), None)
