"""Distillation: it repairs what pruning broke, and it listens to its teacher."""

from __future__ import annotations

import json

import pytest
import torch

from hpml import models
from hpml.artifacts.folder import open_artifact, seal_artifact
from hpml.components.compress import AnyMethod, Distill
from hpml.components.compress import stage as compress
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid
from hpml.tasks import task_of
from hpml.tasks.image_classification.augment_options import Augment
from hpml.tasks.torch_session import TorchSession

PLAIN = Augment(shift=0, rotation_degrees=0, scale=0)


def test_distilling_recovers_what_pruning_lost(run_stage, pruned, small_model, digits_data):
    config = Distill(epochs=4, augment=PLAIN, label_smoothing=0)
    distilled = run_stage(compress.run, config, model=pruned, teacher=small_model, data=digits_data)
    assert distilled.spec.methods == ("prune50", "distill")
    assert distilled.spec.channel_plan == pruned.spec.channel_plan
    assert distilled.spec.parameters == pruned.spec.parameters
    assert pruned.spec.quality["accuracy_top1"] < 0.8 < 0.93 < distilled.spec.quality["accuracy_top1"]
    history = json.loads(distilled.file("history.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2, 3, 4]


def test_the_student_learns_what_the_teacher_says_not_what_the_labels_say(
    run_stage, pruned, small_model, digits_data, tmp_path
):
    """A teacher that has its classes shifted by one makes a student of that kind, when alpha is 1."""
    network = models.load(small_model)
    with torch.no_grad():
        network.head.weight.copy_(network.head.weight.roll(1, dims=0))
        network.head.bias.copy_(network.head.bias.roll(1))
    models.save(network, tmp_path)
    (tmp_path / "history.json").write_text("[]")
    seal_artifact(tmp_path, spec=small_model.spec, metrics={}, lineage=small_model.manifest.lineage)
    wrong = open_artifact(tmp_path, kind="model")
    task = task_of(digits_data.spec.task)
    stored = task.stored(digits_data, "validation")

    config = Distill(epochs=3, alpha=1.0, augment=PLAIN)
    student = run_stage(compress.run, config, model=pruned, teacher=wrong, data=digits_data)
    runs = TorchSession(models.load(student), task, student.spec.operations)
    said = task.outputs(runs, stored)["logits"].argmax(axis=1)
    assert (said == (stored["labels"] + 1) % 10).mean() > 0.85

    config = Distill(epochs=3, alpha=0.0, augment=PLAIN)
    deaf = run_stage(compress.run, config, model=pruned, teacher=wrong, data=digits_data)
    assert deaf.spec.quality["accuracy_top1"] > 0.85


def test_the_keys_of_training_are_its_keys():
    config = validate(AnyMethod, {"method": "distill", "epochs": 3, "learning_rate": 0.01}, where="variants")
    assert (config.epochs, config.learning_rate, config.label) == (3, 0.01, "distill")
    with pytest.raises(ConfigInvalid, match="did you mean 'temperature'"):
        validate(AnyMethod, {"method": "distill", "temprature": 3}, where="variants")
    with pytest.raises(ConfigInvalid, match=r"alpha.*at most 1"):
        validate(AnyMethod, {"method": "distill", "alpha": 2}, where="variants")
