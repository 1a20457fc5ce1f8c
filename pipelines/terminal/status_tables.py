"""The tables of `hpml status`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.terminal import console


def show_steps(record: RunRecord, output: str) -> None:
    """The steps of a run."""
    if output == "json":
        print(record.model_dump_json(indent=2))
        return
    rows = [
        (
            name,
            "incomplete" if step.incomplete else step.status,
            f"{step.seconds:.1f}" if step.seconds else "",
            f"{step.peak_rss_bytes / 1e6:.0f}" if step.peak_rss_bytes else "",
            step.error or step.incomplete,
        )
        for name, step in record.steps.items()
    ]
    console.err.print(f"{record.id}: {_state(record)}")
    console.print_table(("step", "status", "s", "peak MB", "why"), rows, right=(2, 3))


def show_runs(records: Sequence[RunRecord], output: str) -> None:
    """The runs of a workspace, newest first."""
    if output == "json":
        print("[" + ",\n".join(record.model_dump_json() for record in records) + "]")
        return
    rows = [
        (
            record.id,
            _state(record),
            time.strftime("%F %T", time.localtime(record.started_at_s)),
            f"{record.seconds:.1f}",
        )
        for record in records
    ]
    console.print_table(("run", "status", "started", "s"), rows, right=(3,))


def _state(record: RunRecord) -> str:
    """The run's status; one whose executor is gone cannot be running."""
    if (
        record.status == "running"
        and record.executor_pid
        and not Path(f"/proc/{record.executor_pid}").exists()
    ):
        return "died (run it again to resume)"
    return record.status
