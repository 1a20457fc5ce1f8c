"""A training that is killed, stopped or damaged ends where an undisturbed one ends, bit by bit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from components.train.stage import TrainConfig

Make = Callable[..., Any]
SMALL = {"architecture": "cnn", "arguments": {"width": 4}}


def test_twenty_kills_at_random_moments_change_no_bit(trainer: Make) -> None:
    config = TrainConfig(
        model=SMALL, epochs=16, batch_size=32, ema_decay=0.99, label_smoothing=0.05, checkpoint_every_s=0.02
    )
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    chance = random.Random(0)
    for kill in range(20):
        attempt = disturbed.start()
        if kill % 4 < 2:  # so that it gets somewhere; the others may be killed while they start or resume
            attempt.wait_for_a_checkpoint()
        time.sleep(chance.uniform(0, 0.1))
        if kill % 2:
            attempt.process.kill()
            assert attempt.exit_code() == -signal.SIGKILL
        else:
            attempt.process.terminate()
            assert attempt.exit_code() in {143, -signal.SIGTERM}  # the latter before Python handles signals
    disturbed.finish()

    assert disturbed.weights == undisturbed.weights
    assert disturbed.history == undisturbed.history


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_a_stop_saves_the_step_it_was_in(trainer: Make, optimizer: str) -> None:
    """With accumulation: between two parts of a batch there is nothing to save but the step before."""
    config = TrainConfig(
        model=SMALL,
        epochs=6,
        batch_size=64,
        accumulate=16,
        optimizer=optimizer,
        checkpoint_every_s=3600,
    )
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    attempt = disturbed.start()
    attempt.wait_until(lambda: attempt.said("progress"))
    attempt.process.terminate()
    assert attempt.exit_code() == 143
    assert len(attempt.checkpoints()) == 1
    [failure] = attempt.said("failed")
    assert "run again to resume" in failure["message"]
    disturbed.finish()

    assert disturbed.weights == undisturbed.weights
    assert disturbed.history == undisturbed.history


def test_ctrl_c_saves_too(trainer: Make) -> None:
    training = trainer(TrainConfig(model=SMALL, epochs=100, checkpoint_every_s=3600))
    attempt = training.start()
    attempt.wait_until(lambda: attempt.said("progress"))
    signal_process(attempt, signal.SIGINT)
    assert attempt.exit_code() == 130
    assert len(attempt.checkpoints()) == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    trainer: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(model=SMALL, epochs=10, checkpoint_every_s=0)
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    attempt = disturbed.start()
    attempt.wait_until(lambda: len(attempt.checkpoints()) == 2)
    attempt.process.terminate()
    assert attempt.exit_code() == 143
    older, newest = attempt.checkpoints()
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    (newest.parent / f".{newest.name}.part").write_bytes(b"what a kill left of a write")
    capfd.readouterr()
    disturbed.finish()

    told = capfd.readouterr().out
    assert f"the checkpoint {newest} is damaged" in told
    assert "resuming in epoch" in told
    assert disturbed.weights == undisturbed.weights


def test_another_training_does_not_resume_it(trainer: Make, capfd: pytest.CaptureFixture[str]) -> None:
    first = trainer(TrainConfig(model=SMALL, epochs=50, checkpoint_every_s=0))
    attempt = first.start()
    attempt.wait_for_a_checkpoint()
    attempt.process.terminate()
    assert attempt.exit_code() == 143

    first.config = first.config.model_copy(update={"epochs": 1, "seed": 1})
    first.finish()
    fresh = trainer(first.config)
    fresh.finish()
    assert "resuming" not in capfd.readouterr().out
    assert first.weights == fresh.weights


def signal_process(attempt: Any, number: signal.Signals) -> None:
    import os

    os.kill(attempt.process.pid, number)
