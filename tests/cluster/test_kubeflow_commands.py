"""Every component of a compiled pipeline, run by podman with an executor input laid out as by KFP.

Command lines, environments and images are the compiled pipeline's. A container has a read-only root, no
capabilities, and no network, but for what keeps checkpoints in the store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from hpml.artifacts.folder import read_manifest
from hpml.components.executor_input import HTML, METRICS, OUT, SUMMARY
from hpml.pipelines import recipe
from hpml.pipelines.cluster import pods
from hpml.pipelines.kubeflow.compile import compile_pipeline
from tests.kubeflow_launcher import Kubeflow, Task

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests" / "chain_recipe.yaml"
CPU_IMAGE = "localhost/hpml-cpu:test"


@dataclass
class Finished:
    """What became of the run: the metadata that KFP would show of each output, and where it is."""

    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    paths: dict[str, dict[str, Path]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def podman() -> str:
    found = shutil.which("podman")
    if not found:
        pytest.skip("podman is not installed")
    if subprocess.run([found, "image", "exists", CPU_IMAGE], check=False).returncode:
        pytest.skip(f"there is no image {CPU_IMAGE}: tests/cluster/images builds it")
    return found


@pytest.fixture(scope="module")
def secret(s3_endpoint: str) -> dict[str, str]:
    """What the store's Secret gives to pods, and a bucket there."""
    key, password = "ours", uuid.uuid4().hex
    client = boto3.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=s3_endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=password,
    )
    client.create_bucket(Bucket="hpml")
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": password,
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def finished(podman: str, secret: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("kubeflow")
    for volume in ("minio", "outputs", "registry"):
        _folder(folder / volume)
    loaded = recipe.load(RECIPE, (f"cluster.images.cpu={CPU_IMAGE}", "cluster.tracking_uri=''"))
    run = Kubeflow(
        compile_pipeline(loaded).text,
        root="minio://mlpipeline/v2/artifacts/chain-recipe",
        outputs="/tmp/kfp_outputs",
    )
    result = Finished()
    for task in run.tasks():
        for place in task.outputs.values():  # as the launcher does
            _folder((folder / place.removeprefix("/")).parent)
        _folder(folder / "outputs" / task.name)
        _run(podman, task, secret, folder)
        output_file = folder / "outputs" / task.name / Path(task.output_file).name
        result.metadata[task.name] = run.finish(task, output_file)
        result.paths[task.name] = {
            name: folder / place.removeprefix("/") for name, place in task.outputs.items()
        }
    return result


def _folder(place: Path) -> None:
    """A folder that the user of the image may write to, as an emptyDir is."""
    missing = [parent for parent in (place, *place.parents) if not parent.exists()]
    place.mkdir(parents=True, exist_ok=True)
    for parent in {*missing, place}:
        parent.chmod(0o777)


def _run(podman: str, task: Task, secret: dict[str, str], folder: Path) -> None:
    environment = {**task.environment, **secret}
    volumes = {"minio": "/minio", "outputs": "/tmp/kfp_outputs"}
    if task.name == "register":
        environment["MLFLOW_TRACKING_URI"] = "sqlite:////registry/mlflow.db"
        del environment["HPML_STEP"]  # a step that tracks itself, too, would be a second writer of the file
        volumes["registry"] = "/registry"
    entrypoint, *arguments = task.command
    command = [podman, "run", "--rm", "--pull", "never", "--read-only", "--tmpfs", "/tmp:rw,exec,mode=1777"]
    command += ["--user", f"{pods.UID}:{pods.UID}", "--cap-drop", "all"]
    command += ["--security-opt", "no-new-privileges"]
    command += ["--network", "host" if "--scratch" in arguments else "none"]
    for name, place in volumes.items():
        command += ["--volume", f"{folder / name}:{place}"]
    for name in environment:
        command += ["--env", name]
    command += ["--entrypoint", entrypoint, task.image, *arguments]
    answer = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, f"{task.name}: {answer.stdout[-2000:]}\n{answer.stderr[-2000:]}"


def test_every_step_wrote_its_artifact_where_kubeflow_looks(finished: Finished) -> None:
    stages = {
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
    assert stages < finished.paths.keys()
    for name, paths in finished.paths.items():
        manifest = read_manifest(paths[OUT])
        assert finished.metadata[name][OUT]["digest"] == manifest.digest
        assert finished.metadata[name][METRICS] == pytest.approx(dict(manifest.metrics))


def test_the_report_is_on_the_page(finished: Finished) -> None:
    paths = finished.paths["report"]
    assert "<html" in paths[HTML].read_text()[:200].lower()
    assert paths[SUMMARY].read_text().startswith("# ")


def test_the_results_are_those_of_processes(finished: Finished, tmp_path: Path) -> None:
    """Where a stage is deterministic: the same artifacts as a run on this machine makes."""
    hpml = Path(sys.executable).with_name("hpml")
    command = [str(hpml), "run", str(RECIPE), "--only", "train"]
    subprocess.run([*command, "--home", str(tmp_path)], check=True, capture_output=True)
    (record,) = tmp_path.glob("*-*/run.json")
    steps = json.loads(record.read_text())["steps"]
    for name in ("prepare", "train"):
        assert read_manifest(finished.paths[name][OUT]).digest == steps[name]["digest"]
