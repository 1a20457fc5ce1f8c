"""`hpml run --executor kubernetes` on the real cluster: the whole chain, a stop, and the rights it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.access import (
    CLIENT_IMAGE,
    CPU_IMAGE,
    NAMESPACE,
    ROOT,
    Workspace,
    kubectl,
    kubectl_json,
    wait_until,
)

Json = dict[str, Any]
HPML = Path(sys.executable).with_name("hpml")
RECIPE = ROOT / "tests" / "chain_recipe.yaml"
TEXT_RECIPE = ROOT / "tests" / "text_recipe.yaml"
DETERMINISTIC = {"prepare", "train", "compress"}
LAST_DETERMINISTIC = "compress-prune50-distill-quantize"
OURS = "hpml.dev/run"  # a label of whatever belongs to a run

# MLflow and the store take their part of a small node. A pod with one CPU has one thread.
ALL_CPUS = ("train", "compress", "peaks", "benchmark", "diagnose")
CLUSTER = [f"cluster.stages.{stage}.cpus=1" for stage in ALL_CPUS]
CLUSTER += [f"cluster.images.cpu={CPU_IMAGE}", f"cluster.images.client={CLIENT_IMAGE}"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def command(home: Path, *arguments: str, recipe: Path = RECIPE) -> list[str]:
    overrides = [part for setting in CLUSTER for part in ("--set", setting)]
    run = [str(HPML), "run", str(recipe), "--home", str(home), "--executor", "kubernetes"]
    return [*run, *overrides, *arguments]


@pytest.fixture
def run(workspace: Workspace) -> Run:
    """Run a recipe as Jobs: run(home, "--only", "train", KUBECONFIG="...")."""

    def go(
        home: Path, *arguments: str, recipe: Path = RECIPE, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        told = {**os.environ, **workspace.environment, **environment}
        called = command(home, *arguments, recipe=recipe)
        return subprocess.run(called, env=told, capture_output=True, text=True, check=False)

    return go


def steps_of(home: Path) -> dict[str, Json]:
    record: Json = json.loads((home / "latest" / "run.json").read_text())
    steps: dict[str, Json] = record["steps"]
    return steps


def report_of(home: Path) -> Json:
    answer = subprocess.run(
        [str(HPML), "report", "--home", str(home), "-o", "json"], capture_output=True, text=True, check=True
    )
    found: Json = json.loads(answer.stdout)
    return found


def left_of_runs() -> list[str]:
    return kubectl("-n", NAMESPACE, "get", "jobs,pods,configmaps", "-l", OURS, "-o", "name").split()


class Witness:
    """Sees every pod of a run; pods of a run stay until its end."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self._over = threading.Event()

    def _look(self) -> None:
        for pod in kubectl_json("-n", NAMESPACE, "get", "pods", "-l", OURS)["items"]:
            self.pods[pod["metadata"]["name"]] = pod

    def _keep_looking(self) -> None:
        while not self._over.wait(1):
            self._look()

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._keep_looking, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("executor") / "runs"


def test_the_chain_runs_as_pods_and_ends_as_it_does_in_processes(
    run: Run, home: Path, tmp_path: Path
) -> None:
    witness = Witness()
    with witness.watching():
        answer = run(home)
    assert answer.returncode == 0, answer.stderr
    steps = steps_of(home)
    assert {step["status"] for step in steps.values()} == {"done"}

    # each step a pod under Pod Security restricted, its root read-only
    enforced = kubectl_json("get", "namespace", NAMESPACE)["metadata"]["labels"]
    assert enforced["pod-security.kubernetes.io/enforce"] == "restricted"
    labelled = {pod["metadata"]["labels"]["hpml.dev/step"] for pod in witness.pods.values()}
    assert set(steps) <= labelled
    for pod in witness.pods.values():
        [container] = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["automountServiceAccountToken"] is False

    # the same content as in processes of this machine, with as many threads
    bare = tmp_path / "bare"
    one_cpu = str(min(os.sched_getaffinity(0)))
    plain = ["taskset", "--cpu-list", one_cpu, str(HPML), "run", str(RECIPE), "--home", str(bare)]
    subprocess.run([*plain, "--no-tracking", "--only", LAST_DETERMINISTIC], check=True, capture_output=True)
    compared = {name: step for name, step in steps_of(bare).items() if step["stage"] in DETERMINISTIC}
    assert len(compared) == 5
    assert {name: step["digest"] for name, step in compared.items()} == {
        name: steps[name]["digest"] for name in compared
    }

    # a choice that meets the goals, and what a user gets of it
    report = report_of(home)
    assert report["verdicts"][report["chosen"]]["outcome"] == "chosen"
    assert Path(report["report"]).is_file()
    assert (Path(report["bundle"]) / "README.md").is_file()
    wait_until(lambda: not left_of_runs(), "nothing is left of the run")


def test_a_second_run_takes_it_all_from_the_store(run: Run, home: Path, tmp_path: Path) -> None:
    """In another workspace: the keys and the artifacts are in S3."""
    answer = run(tmp_path / "another")
    assert answer.returncode == 0, answer.stderr
    found = steps_of(tmp_path / "another")
    assert {step["status"] for step in found.values()} == {"cached"}
    assert {name: step["digest"] for name, step in found.items()} == {
        name: step["digest"] for name, step in steps_of(home).items()
    }
    assert report_of(tmp_path / "another")["chosen"] == report_of(home)["chosen"]


def test_a_text_recipe_runs_as_pods_and_trains_as_a_pytorchjob(run: Run, tmp_path: Path) -> None:
    home, witness = tmp_path / "runs", Witness()
    with witness.watching():
        smaller = ("--set", "train.nodes=2", "--set", "cluster.stages.train.cpus=0.3")
        answer = run(home, *smaller, recipe=TEXT_RECIPE)
    assert answer.returncode == 0, answer.stderr
    assert {step["status"] for step in steps_of(home).values()} <= {"done", "cached"}
    workers = {
        pod["metadata"]["name"]
        for pod in witness.pods.values()
        if "training.kubeflow.org/job-name" in pod["metadata"]["labels"]
    }
    assert len(workers) == 2
    report = report_of(home)
    assert report["chosen"] in ("fp32/onnx", "int8/onnx")
    assert (
        report["measurements"]["operations"]["prefill"]["engines"][report["chosen"]]["status"] == "measured"
    )
    assert list(Path(report["bundle"]).glob("model_repository/*/1/tokenizer.json"))


def test_a_run_that_is_stopped_leaves_nothing_and_resumes(
    workspace: Workspace, run: Run, tmp_path: Path
) -> None:
    longer = ["--only", "train", "--set", "train.epochs=60"]
    process = subprocess.Popen(
        command(tmp_path, *longer),
        env={**os.environ, **workspace.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = tmp_path / "latest" / "logs" / "train.events.jsonl"
    wait_until(lambda: events.exists() and "epoch 3/" in events.read_text(), "some epochs")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert steps_of(tmp_path)["train"]["status"] == "interrupted"
    wait_until(lambda: not left_of_runs(), "nothing is left of the run")
    again = run(tmp_path, *longer)
    assert again.returncode == 0, again.stderr
    assert steps_of(tmp_path)["prepare"]["status"] == "cached"
    assert "resum" in (tmp_path / "latest" / "logs" / "train.log").read_text()


def test_the_submitters_account_suffices(run: Run, tmp_path: Path) -> None:
    token = kubectl("-n", NAMESPACE, "create", "token", "hpml-submitter").strip()
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    file = tmp_path / "kubeconfig"
    file.touch(mode=0o600)
    file.write_text(json.dumps(config))
    answer = run(tmp_path / "runs", "--only", "prepare", "--force", "prepare", KUBECONFIG=str(file))
    assert answer.returncode == 0, answer.stderr
    assert "may not be read by you" in answer.stderr  # the store's Secret: its keys are in the environment
    assert steps_of(tmp_path / "runs")["prepare"]["status"] == "done"
    wait_until(lambda: not left_of_runs(), "nothing is left of the run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "cluster.namespace=nowhere"], "there is no namespace nowhere"),
        (
            ["--set", "cluster.images.cpu=localhost/nothere:1", "--set", "cluster.pending_s=3"],
            "given up after 3 s",
        ),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_6(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    answer = run(tmp_path, "--only", "prepare", *arguments)
    assert answer.returncode == 6
    assert message in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr
