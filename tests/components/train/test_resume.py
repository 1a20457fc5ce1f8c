"""A training that is killed, stopped or damaged ends where an undisturbed one ends, bit by bit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest

from hpml.components.train.config import TrainConfig
from tests.components.train.attempts import Trainer

Make = Callable[..., Trainer]
SMALL = {"architecture": "cnn", "arguments": {"width": 4}}


def same(first: Trainer, second: Trainer) -> bool:
    return first.weights == second.weights and first.history == second.history


@pytest.mark.slow  # the others kill, too, each once
def test_twenty_kills_at_random_moments_change_no_bit(trainer: Make) -> None:
    config = TrainConfig(model=SMALL, epochs=16, batch_size=32, ema_decay=0.99, checkpoint_every_s=0.02)
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    chance = random.Random(0)
    for kill in range(20):
        attempt = disturbed.start()
        if kill % 4 < 2:  # so that it gets somewhere; the others may be killed while they start or resume
            attempt.wait_for_a_checkpoint()
        time.sleep(chance.uniform(0, 0.1))
        if kill % 2:
            assert attempt.send(signal.SIGKILL) == -signal.SIGKILL
        else:  # before Python handles signals, SIGTERM just ends it
            assert attempt.send(signal.SIGTERM) in {143, -signal.SIGTERM}
    disturbed.finish()

    assert same(disturbed, undisturbed)


_SLOW = pytest.mark.slow  # adamw's state is all that the others have, and more


@pytest.mark.parametrize(
    "optimizer", [pytest.param("sgd", marks=_SLOW), "adamw", pytest.param("lars", marks=_SLOW)]
)
def test_a_stop_saves_the_last_whole_step(trainer: Make, optimizer: str) -> None:
    """Also between two parts of a batch, where the buffers have already changed."""
    config = TrainConfig(
        model=SMALL, epochs=4, accumulate=8, optimizer=optimizer, learning_rate=0.01, checkpoint_every_s=3600
    )
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    attempt = disturbed.start()
    attempt.wait_for_progress()
    assert attempt.send(signal.SIGTERM) == 143
    assert len(attempt.checkpoints()) == 1
    [failure] = attempt.said("failed")
    assert "run again to resume" in failure["message"]
    assert "resuming in epoch" in disturbed.finish().log.read_text()

    assert same(disturbed, undisturbed)


def test_ctrl_c_saves_too(trainer: Make) -> None:
    attempt = trainer(TrainConfig(model=SMALL, epochs=100, checkpoint_every_s=3600)).start()
    attempt.wait_for_progress()
    assert attempt.send(signal.SIGINT) == 130
    assert len(attempt.checkpoints()) == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trainer: Make) -> None:
    config = TrainConfig(model=SMALL, epochs=6, checkpoint_every_s=0)
    undisturbed, disturbed = trainer(config), trainer(config)
    undisturbed.finish()

    attempt = disturbed.start()
    attempt.wait_until(lambda: len(attempt.checkpoints()) > 1)
    assert attempt.send(signal.SIGKILL) == -signal.SIGKILL
    *_, older, newest = attempt.checkpoints()
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    (newest.parent / f".{newest.name}.part").write_bytes(b"what a kill left of a write")

    told = disturbed.finish().log.read_text()
    assert f"the checkpoint {newest} is damaged" in told
    assert str(older) not in told
    assert "resuming in epoch" in told
    assert same(disturbed, undisturbed)


def test_another_training_does_not_resume_it(trainer: Make) -> None:
    changed, fresh = (trainer(TrainConfig(model=SMALL, epochs=1, seed=1)) for _ in range(2))
    attempt = Trainer.start(
        Trainer(changed.root, changed.data, TrainConfig(model=SMALL, checkpoint_every_s=0), threads=1)
    )
    attempt.wait_for_a_checkpoint()
    assert attempt.send(signal.SIGKILL) == -signal.SIGKILL

    assert "resuming" not in changed.finish().log.read_text()
    fresh.finish()
    assert same(changed, fresh)
