"""What is remembered of a run, in `<home>/<run>/run.json`: what `hpml status` and the final table read."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Config
from hpml.core.errors import UsageError
from hpml.pipelines.plan import Plan

Status = Literal["waiting", "running", "done", "cached", "failed", "blocked", "interrupted"]
FINISHED: tuple[Status, ...] = ("done", "cached")


class StepRecord(Config):
    """One step of a run. `key` and `digest` are empty until known; `exit_code` is that of a failed step.

    reasons: why the step could not be taken from the store; empty for a cached one. only_shows: the run does
    not fail of it. incomplete: of a step that is done, what is missing in its result and why.
    """

    stage: str
    status: Status = "waiting"
    key: str = ""
    digest: str = ""
    started_at_s: float = 0.0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    error: str = ""
    exit_code: int = 0
    reasons: tuple[str, ...] = ()
    only_shows: bool = False
    incomplete: str = ""


class RunRecord(Config):
    """One run of a recipe. `executor_pid` tells whether a run that says "running" still does.

    executor: where its steps ran: "process", "container", "kubernetes" or "kubeflow". store: the URI of the
    store that all its artifacts are in; empty for the workspace's own. rebuilt_from: the run whose
    networks it has, which it did not train.
    """

    id: str
    recipe: str
    recipe_file: str
    executor: str = "process"  # of versions before, if it is not told by `store`
    store: str = ""
    status: Status
    started_at_s: float
    seconds: float = 0.0
    executor_pid: int = 0
    exit_code: int = 0
    rebuilt_from: str = ""
    steps: dict[str, StepRecord]


def new_run_id(name: str) -> str:
    """A sortable, unique name for a run: "quickstart-20261121-114502-3f9a01b2"."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def start(
    home: Path,
    run: str,
    name: str,
    recipe_file: str,
    plan: Plan,
    *,
    executor: str = "process",
    store: str = "",
) -> RunRecord:
    """The record of the new run `run` of `plan`, every step waiting; makes its folder."""
    showing = plan.only_shows()
    steps = {
        node.name: StepRecord(stage=node.stage, only_shows=node.name in showing)
        for node in plan.nodes.values()
    }
    record = RunRecord(
        id=run,
        recipe=name,
        recipe_file=recipe_file,
        executor=executor,
        store=store,
        status="running",
        started_at_s=time.time(),
        executor_pid=os.getpid(),
        steps=steps,
    )
    (home / record.id).mkdir(parents=True)
    return record


def save(home: Path, record: RunRecord) -> None:
    """Write the record of a run, atomically."""
    write_text_atomic(home / record.id / "run.json", record.model_dump_json(indent=1))


def point_latest(home: Path, run: str) -> None:
    """Make `<home>/latest` a link to the newest run."""
    part = home / f".latest.{run}"
    part.symlink_to(run)
    part.replace(home / "latest")


def load(home: Path, run: str = "latest") -> RunRecord:
    """The record of a run, by its id or "latest".

    Raises UsageError if there is no such run, naming those there are.
    """
    file = home / run / "run.json"
    try:
        return RunRecord.model_validate_json(file.read_text())
    except (OSError, ValidationError):
        known = [record.id for record in list_runs(home)][:5]
        raise UsageError(
            f"there is no run {run!r} in {home}",
            why=f"the newest are {', '.join(known)}" if known else "nothing has been run there yet",
            fix="start one with: hpml run RECIPE",
        ) from None


def list_runs(home: Path) -> list[RunRecord]:
    """The runs of a workspace, newest first."""
    records = []
    for file in home.glob("*/run.json"):
        # One that is being written, or of another version, is not ours to judge.
        with suppress(OSError, ValidationError):
            if not file.parent.is_symlink():
                records.append(RunRecord.model_validate_json(file.read_text()))
    return sorted(records, key=lambda record: record.started_at_s, reverse=True)
