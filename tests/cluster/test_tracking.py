"""MLflow by the name of its Service, killed in the middle of a run: no step fails, all is there, once."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.cluster.access import (
    CLIENT_IMAGE,
    CPU_IMAGE,
    NAMESPACE,
    ROOT,
    Workspace,
    forwarded,
    kubectl,
    wait_until,
)

HPML = Path(sys.executable).with_name("hpml")
RECIPE = ROOT / "tests" / "chain_recipe.yaml"
EPOCHS = 40
LAST = "compress-prune50"
PREFIX = f"tracked-{secrets.token_hex(4)}"  # a store of its own, in which no step is cached


def command(home: Path, *arguments: str) -> list[str]:
    settings = {
        "name": "tracked",
        "cluster.store": f"s3://hpml/{PREFIX}",
        "train.epochs": str(EPOCHS),
        "train.nodes": "2",  # a PyTorchJob; the other steps are Jobs
        "cluster.stages.train.cpus": "0.4",
        "cluster.stages.compress.cpus": "1",
        "cluster.images.cpu": CPU_IMAGE,
        "cluster.images.client": CLIENT_IMAGE,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    run = [str(HPML), "run", str(RECIPE), "--home", str(home), "--executor", "kubernetes"]
    return [*run, *overrides, *arguments]


def record(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "latest" / "run.json").read_text())
    return found


def scale_mlflow(replicas: int) -> None:
    kubectl("-n", NAMESPACE, "scale", "deployment/mlflow", f"--replicas={replicas}")
    if replicas:
        kubectl("-n", NAMESPACE, "rollout", "status", "deployment/mlflow", "--timeout=180s")


def unsent(workspace: Workspace) -> list[str]:
    """What MLflow has not taken, kept in the store for whichever step comes next."""
    client = boto3.client("s3", endpoint_url=workspace.store_endpoint, region_name="us-east-1")
    found = client.list_objects_v2(Bucket="hpml", Prefix=f"{PREFIX}/tracking/")
    return [item["Key"] for item in found.get("Contents", ())]


@pytest.fixture
def environment(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in workspace.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")
    return dict(os.environ)


def test_an_outage_of_mlflow_delays_events_and_loses_none(
    workspace: Workspace, environment: dict[str, str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command(tmp_path, "--only", LAST),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        events = tmp_path / "latest" / "logs" / "train.events.jsonl"
        wait_until(lambda: events.exists() and events.read_text().count('"metric"') > 4, "some epochs")
        try:
            scale_mlflow(0)
            wait_until(
                lambda: record(tmp_path)["steps"]["train"]["status"] == "done", "the training", seconds=300
            )
        finally:
            scale_mlflow(1)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()  # if it has not ended
    assert process.returncode == 0, said
    folder, steps = (tmp_path / "latest").resolve(), record(tmp_path)["steps"]
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(
        ("prepare", "train", LAST), "done"
    )

    # the next step of whichever run sends what was kept
    later = command(tmp_path, "--only", "prepare", "--force", "prepare")
    subprocess.run(later, env=environment, check=True, capture_output=True)
    wait_until(lambda: not unsent(workspace), "the store holds no events any more")

    with forwarded("mlflow", 5000) as uri:
        found = runs_of(MlflowClient(uri), folder.name)
        told = Counter(run.data.tags.get("hpml.step", "") for run in found)
        assert told == {"": 1, "prepare": 1, "train": 1, LAST: 1}
        by_step = {run.data.tags.get("hpml.step", ""): run for run in found}
        assert {run.info.status for run in found} == {"FINISHED"}
        for name, step in steps.items():
            assert by_step[name].data.tags["artifact"] == step["digest"]
        client = MlflowClient(uri)
        expected = metrics_of(folder / "logs" / "train.events.jsonl")
        assert len({index for _, index in expected}) >= EPOCHS
        for metric in {name for name, _ in expected}:
            points = client.get_metric_history(by_step["train"].info.run_id, metric)
            curve = [point.step for point in points if (metric, point.step) in expected]
            assert Counter(curve) == {index: 1 for name, index in expected if name == metric}


def runs_of(client: MlflowClient, run_id: str) -> list[Run]:
    experiment = client.get_experiment_by_name("tracked")
    assert experiment
    return list(client.search_runs([experiment.experiment_id], f"tags.`hpml.run` = '{run_id}'"))


def metrics_of(events: Path) -> set[tuple[str, int]]:
    """Name and index of every point that the training told."""
    told = [json.loads(line) for line in events.read_text().splitlines()]
    return {(event["name"], event["index"]) for event in told if event["event"] == "metric"}
