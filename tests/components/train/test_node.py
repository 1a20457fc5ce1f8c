"""One node of a training on several: its exit code says whether the operator should start it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpml.components.train.node import exit_code
from tests.ports import free_port

Start = Callable[..., subprocess.Popen[str]]

SUMS_FOR_EVER = """
import time
from hpml.core.errors import explained
from hpml.training.distributed import joined_group

with explained(), joined_group() as group:
    while group.sum([1.0]) == [2.0]:
        print("sum of both", flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("worker", "node"),
    [(2, 2), (3, 3), (4, 4), (5, 5), (1, 1), (6, 143), (130, 143), (143, 143), (-9, 143), (-11, 143)],
)
def test_what_would_fail_again_keeps_its_code_and_the_rest_is_worth_another_try(
    worker: int, node: int
) -> None:
    assert exit_code(worker) == node


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a node with PET_* variables as the training operator sets them; whatever is left is killed."""
    port = free_port()
    nodes: list[subprocess.Popen[str]] = []

    def start_one(*command: str, nodes_of_job: int) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PET_NNODES": f"{nodes_of_job}:{nodes_of_job}",
            "PET_NPROC_PER_NODE": "1",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_MAX_RESTARTS": "0",
            "PYTHONPATH": str(Path.cwd()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        node = subprocess.Popen(
            [sys.executable, "-m", "hpml.components.train.node", "--local-addr", "127.0.0.1", *command],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        nodes.append(node)
        return node

    yield start_one
    for node in nodes:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def test_a_node_ends_with_the_code_of_its_worker(start: Start) -> None:
    node = start("--no-python", "sh", "-c", "exit 5", nodes_of_job=1)
    assert node.wait() == 5


def test_a_node_whose_worker_did_its_work_ends_well(start: Start) -> None:
    node = start("--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE", nodes_of_job=1)
    assert node.wait() == 0
    assert node.stdout is not None and "0 of 1" in node.stdout.read()


def workers_of(node: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(node.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_a_node_can_be_stopped_and_takes_its_worker_along(start: Start) -> None:
    node = start("--no-python", "sh", "-c", "echo works; sleep 60", nodes_of_job=1)
    assert node.stdout is not None
    while "works" not in node.stdout.readline():
        pass
    pids = workers_of(node)
    node.send_signal(signal.SIGTERM)
    assert node.wait() == 143
    assert len(pids) == 1 and not Path("/proc", str(pids[0])).exists()


def test_when_a_node_is_killed_the_others_are_worth_another_try(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(SUMS_FOR_EVER)
    survivor, victim = (start(str(script), nodes_of_job=2) for _ in range(2))
    assert victim.stdout is not None and survivor.stdout is not None
    while "sum of both" not in victim.stdout.readline():
        pass
    for pid in [victim.pid, *workers_of(victim)]:
        os.kill(pid, signal.SIGKILL)
    assert survivor.wait() == 143
    said = survivor.stdout.read()
    # Its worker misses the other's, or it misses the store that the other kept, whichever is noticed first.
    assert "another worker of this training is gone" in said or "the other nodes cannot be reached" in said
