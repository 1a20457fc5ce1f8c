"""The same over HTTP: a real MLflow server keeps the tracked runs, the versions and their files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from hpml.artifacts.folder import open_artifact
from hpml.components.register.config import RegisterConfig
from hpml.io.tracking import Outbox, client, drain
from tests.ports import free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, new_store: Path) -> Iterator[str]:
    """The URI of an MLflow server of our own."""
    place = tmp_path_factory.mktemp("server")
    shutil.copy(new_store, place / "mlflow.db")
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{place / 'mlflow.db'}"]
    files = ["--artifacts-destination", str(place / "files")]
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *files, *where],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        while not _answers(uri):
            assert process.poll() is None, (place / "log").read_text()
            time.sleep(0.1)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow  # test_register has two at once, too, without a server
def test_two_runs_register_at_once_over_http(
    server: str, choose: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    chosen = choose(b"weights over http")
    config = RegisterConfig(model_name="served").model_dump_json()
    inputs = [part for name, path in chosen.paths.items() for part in (f"--{name}", path)]
    command = [sys.executable, "-m", "hpml.components", "register", "--config", config, *inputs]
    outs = [tmp_path / "out-1", tmp_path / "out-2"]
    both = [
        subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for out in outs
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [err for _, err in said] == ["", ""] and all(len(out.splitlines()) == 1 for out, _ in said)
    specs = [open_artifact(out, kind="registration").spec for out in outs]
    assert [(spec.version, spec.registry) for spec in specs] == [(1, server), (1, server)]
    assert [int(v.version) for v in client(server).search_model_versions("name = 'served'")] == [1]

    mlflow.set_tracking_uri(server)
    try:
        place = mlflow.artifacts.download_artifacts(
            artifact_uri="models:/served@champion", dst_path=str(tmp_path / "downloaded")
        )
    finally:
        mlflow.set_tracking_uri(None)
    assert open_artifact(Path(place), kind="engine").digest == chosen.engine.digest


@pytest.mark.slow  # starts a server; test_tracking does it on a file
def test_a_run_is_tracked_over_http_once(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "outbox.jsonl"
    outbox = Outbox(path, "r1", "over-http")
    outbox.run_started({"a": 1}, {})
    outbox.step_started("train", {"lr": 0.1})
    outbox.metric("train", "loss", 0.5, 0, 1000.0)
    outbox.step_ended("train", "FINISHED", {"accuracy": 0.9}, 1.0, {})
    outbox.run_ended("FINISHED")
    for _ in range(2):
        assert drain(path, server).ended
        path.with_name("outbox.jsonl.sent").unlink()
    assert capfd.readouterr() == ("", "")

    experiment = client(server).get_experiment_by_name("over-http")
    runs = {
        run.data.tags.get("hpml.step", ""): run
        for run in client(server).search_runs([experiment.experiment_id])
    }
    assert set(runs) == {"", "train"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs["train"].data.metrics == {"loss": 0.5, "accuracy": 0.9, "seconds": 1.0}
    assert len(client(server).get_metric_history(runs["train"].info.run_id, "loss")) == 1
