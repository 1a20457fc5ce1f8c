"""Artifacts and configs of versions before there were tasks are read, as their JSON was."""

from __future__ import annotations

from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.model import ModelSpec
from hpml.components.train.config import TrainConfig
from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.targets import AnyTarget
from hpml.tasks import task_of
from tests.image_tasks import image_task

TASK = image_task((3, 8, 6), classes=2, mean=0.5, std=0.25)
OF_NETWORKS: dict[str, Any] = {
    "class_names": ["0", "1"],
    "input": {"name": "x_nchw", "shape_chw": [3, 8, 6], "mean": [0.5] * 3, "std": [0.25] * 3},
    "parameters": 7,
    "macs": 8,
    "accuracy_top1": 0.9,
}


def test_a_dataset() -> None:
    written = {
        "kind": "dataset",
        "class_names": ["0", "1"],
        "image_shape_hwc": [8, 6, 3],
        "splits": {"train": {"rows": 3, "class_counts": [1, 2]}},
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "source": "npz",
        "licence": "CC0-1.0",
    }
    spec = DatasetSpec.model_validate(written)
    assert task_of(spec.task) == TASK and spec.split("train").class_counts == (1, 2)
    with pytest.raises(StageFailed, match=r"no validation split: it has train: .* -> prepare it again"):
        spec.split("validation")


def test_a_model() -> None:
    spec = ModelSpec.model_validate(OF_NETWORKS | {"architecture": {"name": "cnn"}})
    assert task_of(spec.task) == TASK and spec.quality == {"accuracy_top1": 0.9}
    [predict], [now] = spec.operations, TASK.operations()
    for ends in ("inputs", "outputs"):
        ours, theirs = getattr(now, ends), getattr(predict, ends)
        assert [(one.name, one.shape) for one in theirs] == [(one.name, one.shape) for one in ours]


def test_an_engine() -> None:
    fields = {"target": {"target": "onnx"}, "status": "built", "precision": "fp32", "methods": []}
    spec = EngineSpec.model_validate(OF_NETWORKS | fields | {"top1_agreement": 0.99})
    assert task_of(spec.task) == TASK and spec.quality == {"accuracy_top1": 0.9}
    assert spec.agreement == 0.99 and spec.operations[0].inputs[0].shape == ("batch", 3, 8, 6)


def test_the_accuracy_that_a_training_asked_for() -> None:
    assert validate(TrainConfig, {"min_accuracy": 0.9}, where="train").required == {"accuracy_top1": 0.9}
    assert validate(TrainConfig, {"min_accuracy": None}, where="train").required == {}


@pytest.mark.parametrize(
    ("before", "now"), [("min_top1_agreement", "min_agreement"), ("max_accuracy_drop", "max_quality_loss")]
)
def test_the_bounds_of_the_gate(before: str, now: str) -> None:
    target = validate(AnyTarget, {"target": "onnx", "tolerance": {before: 0.5}}, where="targets")
    assert getattr(target.tolerance, now) == 0.5
