"""Every component's command line of a compiled pipeline, as a process with an executor input like KFP's."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests

from hpml.artifacts.folder import read_manifest
from hpml.components.executor_input import HTML, METRICS, OUT, SUMMARY
from tests.compiling import compiled
from tests.kubeflow_launcher import RUN_ID, Kubeflow, Task

pytestmark = pytest.mark.slow  # a chain of processes; test_executor_input tries their command lines

RECIPE = Path(__file__).parents[1] / "chain_recipe.yaml"
ROOT = Path(__file__).parents[2]
SMALLER = (
    "variants={int8: [quantize]}",
    "targets=[onnx]",
    "benchmark.launches=1",
    "benchmark.batch_sizes=[1]",
    "benchmark.scenarios=[]",
    "benchmark.concurrency=[]",
    "goals.max_quality_loss=0.5",
    "cluster.tracking_uri=''",
)


@dataclass
class Finished:
    """What became of the run: of each task its output and the metadata that KFP would show."""

    outputs: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    paths: dict[str, dict[str, str]] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)  # into the store, by path
    left_in_store: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def secret(s3_endpoint: str) -> dict[str, str]:
    """What the store's Secret gives to pods, and a bucket there."""
    given = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "ours",
        "AWS_SECRET_ACCESS_KEY": uuid.uuid4().hex,
        "AWS_REGION": "us-east-1",
    }
    requests.post(f"{s3_endpoint}/moto-api/reset", timeout=10)
    _client(given).create_bucket(Bucket="hpml")
    return given


def _client(secret: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        region_name=secret["AWS_REGION"],
        endpoint_url=secret["AWS_ENDPOINT_URL"],
        aws_access_key_id=secret["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=secret["AWS_SECRET_ACCESS_KEY"],
    )


class Puts(logging.Handler):
    """Remembers what was put into the store, from the log of its server."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.paths += re.findall(r"PUT (\S+) HTTP", record.getMessage())


@pytest.fixture(scope="module")
def finished(secret: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("kubeflow")
    text = compiled(RECIPE, *SMALLER).text
    run = Kubeflow(text, root=f"{folder}/artifacts", outputs=f"{folder}/outputs", parameters={"epochs": 3})
    result, puts = Finished(), Puts()
    logging.getLogger("werkzeug").addHandler(puts)
    for task in run.tasks():
        for place in (*task.outputs.values(), task.output_file):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        result.outputs[task.name] = _run(task, secret, folder)
        result.metadata[task.name] = run.finish(task, Path(task.output_file))
        result.paths[task.name] = task.outputs
    logging.getLogger("werkzeug").removeHandler(puts)
    result.put = puts.paths
    listed = _client(secret).list_objects_v2(Bucket="hpml").get("Contents", [])
    result.left_in_store = [item["Key"] for item in listed]
    return result


def _run(task: Task, secret: dict[str, str], folder: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **task.environment, **secret}
    environment["HOME"] = str(folder)
    if task.name == "register":
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        del environment["HPML_STEP"]  # a step that tracks itself, too, would be a second writer of the file
    answer = subprocess.run(
        [sys.executable, *task.command[1:]],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, f"{task.name}: {answer.stdout}\n{answer.stderr}"
    return answer.stdout


def test_every_step_wrote_its_artifact_where_kubeflow_looks(finished: Finished) -> None:
    names = {
        "prepare",
        "train",
        "benchmark",
        "peaks",
        "diagnose",
        "report",
        "select",
        "register",
        "bundle",
    }
    assert names < finished.paths.keys()
    for name, paths in finished.paths.items():
        assert finished.metadata[name][OUT]["digest"] == read_manifest(Path(paths[OUT])).digest


def test_metrics_are_on_the_page(finished: Finished) -> None:
    metrics = read_manifest(Path(finished.paths["train"][OUT])).metrics
    assert metrics and finished.metadata["train"][METRICS] == metrics


def test_the_report_is_on_the_page(finished: Finished) -> None:
    paths = finished.paths["report"]
    assert "<html" in Path(paths[HTML]).read_text()[:200].lower()
    assert Path(paths[SUMMARY]).read_text().startswith("# ")


def test_a_parameter_of_the_run_reaches_the_config(finished: Finished) -> None:
    config = read_manifest(Path(finished.paths["train"][OUT])).lineage.config
    assert config["epochs"] == 3  # the recipe says 4


def test_progress_is_among_the_lines_of_the_log(finished: Finished) -> None:
    lines = [line for line in finished.outputs["train"].splitlines() if line.startswith("#hpml ")]
    assert any('"event": "progress"' in line for line in lines)


def test_checkpoints_are_kept_under_the_id_of_the_run_and_go_with_success(finished: Finished) -> None:
    folder = f"/hpml/scratch/{RUN_ID}/train/checkpoints-"
    assert any(path.startswith(folder) and path.endswith(".safetensors") for path in finished.put)
    # The rounds of a benchmark that a busy machine left incomplete stay for the next attempt.
    left = [key for key in finished.left_in_store if key.startswith("scratch/")]
    assert not [key for key in left if "/benchmark/rounds/" not in key]
