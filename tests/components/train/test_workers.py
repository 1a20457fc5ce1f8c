"""Two processes train what one trains, and stop, resume, fail and die together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load

from hpml.components.train.config import TrainConfig
from tests.components.train.attempts import Attempt, Trainer

Make = Callable[..., Trainer]

# Layer norm does not look at the other images of a batch, so that sharing it changes only the rounding.
VIT = {
    "architecture": "vit",
    "arguments": {"image_size": 8, "patch": 2, "dim": 16, "depth": 1, "heads": 2},
}
CONFIG = TrainConfig(model=VIT, epochs=12, learning_rate=0.05, nproc_per_node=2, checkpoint_every_s=3600)


def workers(attempt: Attempt) -> list[int]:
    """The process ids of the workers, the first one first."""
    pid = attempt.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    command = b"hpml.components.train.multiprocess"
    return [int(child) for child in children if command in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow  # each of its trainings imports torch twice; the quicker ones start two workers, too
def test_two_workers_stop_and_resume_and_end_where_one_process_ends(trainer: Make) -> None:
    alone = trainer(CONFIG.model_copy(update={"nproc_per_node": 1}))
    together, disturbed = trainer(CONFIG, threads=2), trainer(CONFIG, threads=2)
    alone.finish()
    finished = together.finish()
    one, two = load(alone.weights), load(together.weights)
    # All together: they add in another order, and a bias whose gradient is next to nothing follows that.
    apart = sum(float((weights - two[name]).square().sum()) for name, weights in one.items())
    assert apart < 1e-3 * sum(float(weights.square().sum()) for weights in one.values())
    for row, other in zip(alone.history, together.history, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-2)
        assert other["validation_accuracy_top1"] == pytest.approx(row["validation_accuracy_top1"], abs=0.02)
    losses = [event for event in finished.said("metric") if event["name"] == "loss"]
    assert [event["index"] for event in losses] == list(range(1, 13))  # of the first worker only

    for whom in ("a worker", "the stage"):  # Kubernetes stops any pod, the executor the process it started
        attempt = disturbed.start()
        attempt.wait_for_progress()
        pids = workers(attempt)
        assert len(pids) == 2
        if whom == "a worker":
            os.kill(pids[1], signal.SIGTERM)
            assert attempt.exit_code() == 143
        else:
            assert attempt.send(signal.SIGTERM) == 143
        assert all(is_gone(pid) for pid in pids)
        assert attempt.checkpoints()
    assert "resuming in epoch" in disturbed.finish().log.read_text()
    assert disturbed.weights == together.weights
    assert disturbed.history == together.history


@pytest.mark.slow  # likewise
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_training_goes_on_with_another_number_of_workers(trainer: Make, before: int, after: int) -> None:
    """As on a cluster where a node is lost or comes back. One long epoch: it is interrupted in the middle."""
    config = TrainConfig(model=VIT, epochs=1, batch_size=4, learning_rate=0.01, checkpoint_every_s=3600)
    undisturbed, disturbed = trainer(config), trainer(config, threads=2)
    undisturbed.finish()

    disturbed.config = config.model_copy(update={"nodes": before, "min_nodes": 1})
    attempt = disturbed.start()
    attempt.wait_for_progress()
    assert attempt.send(signal.SIGTERM) == 143
    disturbed.config = config.model_copy(update={"nodes": after, "min_nodes": 1})
    told = disturbed.finish().log.read_text()
    assert f"with {after} workers instead of {before}" in told

    [row], [expected] = disturbed.history, undisturbed.history
    assert row["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert row["train_accuracy_top1"] == pytest.approx(expected["train_accuracy_top1"], abs=0.02)
    one, two = load(undisturbed.weights), load(disturbed.weights)
    for name, weights in one.items():
        assert (weights - two[name]).abs().max() < 2e-2 * weights.abs().max(), name


@pytest.mark.slow  # they are the same workers under another name
def test_nodes_on_one_machine_are_its_processes(trainer: Make) -> None:
    same_workers = trainer(CONFIG.model_copy(update={"epochs": 1}), threads=2)
    nodes = CONFIG.model_copy(update={"epochs": 1, "nodes": 2, "nproc_per_node": 1, "min_nodes": 1})
    on_nodes = trainer(nodes, threads=2)
    same_workers.finish()
    told = on_nodes.finish().log.read_text()
    assert on_nodes.weights == same_workers.weights
    assert "2 nodes x 1 workers: 2 processes of this machine stand in for them" in told
    assert "min_nodes is for a cluster and does nothing here" in told


@pytest.mark.slow  # the quicker ones end workers, too
def test_workers_die_with_the_stage(trainer: Make) -> None:
    attempt = trainer(CONFIG, threads=2).start()
    attempt.wait_until(lambda: len(workers(attempt)) == 2)  # also while they start
    pids = workers(attempt)
    attempt.wait_for_progress()
    assert attempt.send(signal.SIGKILL) == -signal.SIGKILL
    wait_until_gone(pids)


def test_a_killed_worker_fails_the_stage_and_ends_the_others(trainer: Make) -> None:
    attempt = trainer(CONFIG.model_copy(update={"epochs": 1000}), threads=2).start()
    attempt.wait_for_progress()
    pids = workers(attempt)
    os.kill(pids[1], signal.SIGKILL)
    assert attempt.exit_code() == 4
    assert all(is_gone(pid) for pid in pids)
    [failure] = attempt.said("failed")
    assert "training worker 1 of 2 was ended by SIGKILL" in failure["message"]


@pytest.mark.slow  # the quicker ones have a worker fail, too: it is killed
def test_the_error_of_a_worker_is_the_error_of_the_stage(trainer: Make) -> None:
    attempt = trainer(CONFIG.model_copy(update={"learning_rate": 1e9}), threads=2).start()
    assert attempt.exit_code() == 4
    [failure] = attempt.said("failed")
    assert failure["message"].startswith("the loss is no longer finite")
    assert "lower learning_rate" in failure["message"]
