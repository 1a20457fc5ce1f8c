"""The entrypoint under a real torchrun, all in S3: as on the nodes of a cluster, here on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact
from hpml.io.storage import fetch, upload
from tests.components.conftest import Bucket
from tests.ports import free_port

pytestmark = pytest.mark.slow  # test_workers and test_node try the parts: workers, and a node of torchrun

CNN = {"architecture": "cnn", "arguments": {"width": 4}}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def data_uri(bucket: Bucket, digits_data: Artifact[DatasetSpec]) -> str:
    upload(digits_data.path, f"{bucket.uri}/data")
    return f"{bucket.uri}/data"


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def arguments(config: dict[str, Any], data_uri: str, bucket: Bucket, *, threads: int) -> list[str]:
    lineage = json.dumps({"code_digest": "c0de"})
    return [
        *("-m", "hpml.components", "train", "--config", json.dumps(config), "--threads", str(threads)),
        *("--data", data_uri, "--out", f"{bucket.uri}/model", "--scratch", f"{bucket.uri}/scratch"),
        *("--events", "-", "--lineage", lineage),
    ]


def test_workers_under_torchrun_write_what_local_workers_write(
    bucket: Bucket, data_uri: str, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    config = {"model": CNN, "epochs": 1, "nproc_per_node": 2}
    launched = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *arguments(config, data_uri, bucket, threads=2)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr
    local = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "hpml.components",
                "train",
                "--config",
                json.dumps(config),
                "--threads",
                "2",
            ),
            *("--data", str(digits_data.path), "--out", str(tmp_path / "local")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert local.returncode == 0, local.stderr

    model = open_artifact(fetch(f"{bucket.uri}/model", tmp_path / "launched"), kind="model")
    assert model.digest == open_artifact(tmp_path / "local", kind="model").digest
    assert {key.partition("/")[0] for key in bucket.listing()} == {"data", "model"}
    lines = launched.stdout.splitlines()
    assert sum(line.startswith('{"digest"') for line in lines) == 1, "one worker speaks for all"
    assert sum('"event": "finished"' in line for line in lines) == 1
    assert [line for line in lines if '"name": "loss"' in line][1:] == []


@contextlib.contextmanager
def agents(count: int, worker: list[str], logs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`count` nodes of an elastic training that may go on with one, all on this machine.

    The first is where they meet, as rank 0's pod is: without it no other can go on.
    """
    endpoint = f"127.0.0.1:{free_port()}"

    def command(number: int) -> list[str]:
        return [
            *(*TORCHRUN, "--nnodes", f"1:{count}", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "ours"),
            *("--rdzv-conf", f"last_call_timeout=15,is_host={int(number == 0)}"),
            *("--local-addr", "127.0.0.1", *worker),
        ]

    started = []
    try:
        for number in range(count):
            with (logs / f"node-{number}.txt").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command(number), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        yield started
    finally:
        for agent in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def worker_of(agent: subprocess.Popen[bytes]) -> int | None:
    """The process id of the only worker of a node, if it has one now."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    workers = [
        int(child) for child in children if b"hpml.components" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return workers[0] if workers else None


def test_when_a_node_is_lost_the_other_goes_on_from_the_checkpoint_in_the_store(
    bucket: Bucket, data_uri: str, tmp_path: Path
) -> None:
    config = {"model": CNN, "epochs": 20, "nodes": 2, "min_nodes": 1, "checkpoint_every_s": 0.1}
    logs = tmp_path / "logs"
    logs.mkdir()

    def said() -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(logs.iterdir()))

    with agents(2, arguments(config, data_uri, bucket, threads=1), logs) as nodes:
        until = time.monotonic() + 240
        while not any(key.startswith("scratch/") for key in bucket.listing()):
            assert time.monotonic() < until and all(node.poll() is None for node in nodes), said()
            time.sleep(0.05)
        # With its agent, as a pod goes. Of a worker alone torchrun's agents may count different numbers of
        # restarts (one for a failure, none for a new member), and their workers then wait for each other.
        worker = worker_of(nodes[1])
        assert worker
        for lost in (nodes[1].pid, worker):
            os.kill(lost, signal.SIGKILL)
        assert nodes[0].wait(timeout=240) == 0, said()

    assert "resuming in epoch" in said()
    assert "another worker of this training is gone" in said()
    assert '"event": "finished"' in said()
    model = open_artifact(fetch(f"{bucket.uri}/model", tmp_path / "model"), kind="model")
    history = json.loads(model.file("history.json").read_text())
    assert [row["epoch"] for row in history] == list(range(1, 21))
    assert {key.partition("/")[0] for key in bucket.listing()} == {"data", "model"}
