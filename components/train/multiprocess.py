"""Training in several processes of this machine: the side that starts them, and what each of them runs."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Events, Output, Result, validate
from hpml.core.errors import HpmlError, StageFailed, explained
from hpml.core.process import die_with_parent
from hpml.training.distributed import parent, rank, run_workers


def train_in_workers(config: TrainConfig, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]:
    """Train in `config.workers` processes; the first of them writes the model into `out.path`.

    Raises what the first worker that failed raised; see `run_workers` for workers that are stopped or killed.
    """
    if config.nodes > 1:
        unheeded = "" if config.min_nodes is None else "; min_nodes is for a cluster and does nothing here"
        print(
            f"{config.nodes} nodes x {config.nproc_per_node} workers: {config.workers} processes of this"
            f" machine stand in for them{unheeded}",
            flush=True,
        )
    folder = out.scratch / "workers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task = {
        "config": config.model_dump(mode="json"),
        "data": str(data.path),
        "path": str(out.path),
        "scratch": str(out.scratch),
        "events": str(out.events.path or ""),
        "threads": max(1, out.threads // config.workers),
    }
    (folder / "task.json").write_text(json.dumps(task))
    statuses = run_workers(__name__, str(folder), count=config.workers, threads=out.threads)
    if any(statuses):
        raise _failure(folder, statuses)
    result = json.loads((folder / "result.json").read_text())
    return Result(ModelSpec.model_validate(result["spec"]), result["metrics"], result["rejected"])


def _failure(folder: Path, statuses: list[int]) -> HpmlError:
    """The error of the worker that failed first: the others fail because it is gone."""
    events = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    if not events:
        return StageFailed(f"the training workers ended with the exit codes {', '.join(map(str, statuses))}")
    first = min(events, key=lambda event: float(event["monotonic_s"]))
    error = HpmlError(first["message"])
    error.exit_code = first["exit_code"]
    return error


def main() -> None:
    """Be one worker; the folder with the task is the only argument."""
    die_with_parent(parent(), signal.SIGKILL)
    folder = Path(sys.argv[1])
    failures = Events(folder / f"{rank()}.jsonl")

    def record(kind: str, **fields: Any) -> None:
        failures.write(
            kind, monotonic_s=time.monotonic(), **fields
        )  # one clock for all processes of a machine

    with explained(record=record):
        result = _train(json.loads((folder / "task.json").read_text()), folder)
        if rank() == 0:
            spec = result.spec.model_dump(mode="json")
            answer = {"spec": spec, "metrics": dict(result.metrics), "rejected": result.rejected}
            (folder / "result.json").write_text(json.dumps(answer))


def _train(task: dict[str, Any], folder: Path) -> Result[ModelSpec]:
    from hpml.components.train.local import train

    config: TrainConfig = validate(TrainConfig, task["config"], where="the config of train")
    data = open_artifact(Path(task["data"]), kind="dataset", verify=False)  # its starter has verified it
    place, events = task["path"], task["events"]
    if rank() > 0:  # its copy of the model is not needed
        place, events = tempfile.mkdtemp(dir=folder), ""
    told = Events(Path(events) if events else None)
    return train(config, data, Output(Path(place), Path(task["scratch"]), task["threads"], told))


if __name__ == "__main__":
    main()
