"""The stage, run as its container runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, read_manifest
from hpml.components.compress import stage as compress
from hpml.components.compress.prune import Prune
from hpml.components.train import stage
from hpml.components.train.config import TrainConfig
from hpml.core.errors import ConfigInvalid, GateFailed, StageFailed
from hpml.tasks import task_of
from hpml.training.loop import evaluate
from tests.components.train.attempts import Trainer

RunStage = Callable[..., Artifact[Any]]
CNN = {"architecture": "cnn", "arguments": {"width": 16}}


def test_it_learns_the_digits_and_says_how(run_stage: RunStage, digits_data: Artifact[DatasetSpec]) -> None:
    model = run_stage(stage.run, TrainConfig(model=CNN, epochs=12), data=digits_data)
    spec, metrics = model.spec, model.manifest.metrics
    accuracy = spec.quality["accuracy_top1"]
    assert accuracy > 0.96
    assert spec.task == digits_data.spec.task
    assert [one.shape for one in spec.operations[0].inputs] == [("batch", 1, 8, 8)]

    assert evaluate(models.load(model), digits_data) == spec.quality

    history = json.loads(model.file("history.json").read_text())
    assert [row["epoch"] for row in history] == list(range(1, 13))
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["validation_accuracy_top1"] == accuracy == metrics["validation_accuracy_top1"]
    assert metrics["gflop_per_s"] == pytest.approx(metrics["images_per_s"] * 6 * spec.macs / 1e9)
    assert not any("share" in name or "peak" in name for name in metrics)  # of what peak, `peaks` says
    assert min(metrics[name] for name in ("images_per_s", "data_s", "compute_s", "evaluation_s")) > 0


def test_the_same_config_writes_the_same_bytes(
    run_stage: RunStage, digits_data: Artifact[DatasetSpec]
) -> None:
    config = TrainConfig(model=CNN, epochs=1)
    first, second = (run_stage(stage.run, config, data=digits_data) for _ in range(2))
    other = run_stage(stage.run, config.model_copy(update={"seed": 1}), data=digits_data)
    assert first.digest == second.digest != other.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "adamw", "schedule": "cosine", "learning_rate": 0.003},
        *(
            pytest.param(changed, marks=pytest.mark.slow)  # tests/components/training tries each
            for changed in (
                {"optimizer": "lars", "batch_size": 128, "epochs": 12},
                {"ema_decay": 0.99, "channels_last": False},
                {"augment": {"shift": 0, "rotation_degrees": 0, "scale": 0}, "label_smoothing": 0},
            )
        ),
    ],
    ids=lambda changed: next(iter(changed)) + "-" + str(next(iter(changed.values()))),
)
def test_every_way_of_training_learns(
    run_stage: RunStage, digits_data: Artifact[DatasetSpec], changed: dict[str, Any]
) -> None:
    model = run_stage(
        stage.run, TrainConfig.model_validate({"model": CNN, "epochs": 8, **changed}), data=digits_data
    )
    assert model.spec.quality["accuracy_top1"] > 0.9


@pytest.mark.skipif(
    bool(TrainConfig(device="cpu", precision="bf16").unsupported_reason()),
    reason="this CPU would emulate bf16",
)
def test_mixed_precision_learns(trainer: Callable[..., Trainer]) -> None:
    """On one thread: in bf16 several wait for each other by spinning, for minutes on a busy machine."""
    mixed, full = (
        trainer(TrainConfig(model=CNN, epochs=4, device="cpu", precision=precision), threads=1)
        for precision in ("bf16", "fp32")
    )
    mixed.finish()
    full.finish()
    assert mixed.history[-1]["validation_accuracy_top1"] > 0.9
    assert mixed.weights != full.weights


@pytest.mark.slow  # test_models tries its forward and backward
def test_a_vit_learns(run_stage: RunStage, digits_data: Artifact[DatasetSpec]) -> None:
    arguments = {"image_size": 8, "patch": 2, "dim": 32, "depth": 2, "heads": 2}
    config = TrainConfig(
        model={"architecture": "vit", "arguments": arguments}, epochs=8, optimizer="adamw", learning_rate=0.01
    )
    model = run_stage(stage.run, config, data=digits_data)
    assert model.spec.quality["accuracy_top1"] > 0.4  # 0.1 is chance; it is slow to learn


def test_below_what_is_required_the_model_is_kept_and_rejected(
    run_stage: RunStage, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    config = TrainConfig(model=CNN, epochs=1, required={"accuracy_top1": 1.0})
    with pytest.raises(GateFailed, match=r"train.required asks for 100\.00%"):
        run_stage(stage.run, config, data=digits_data)
    assert read_manifest(tmp_path / "stage-1").rejected


@pytest.mark.parametrize(
    ("required", "told"),
    [
        ({"perplexity": 3}, "no metric 'perplexity' -> give one of accuracy_top1"),
        ({"accuracy_top1": 90}, "0.9 for 90 %"),
    ],
)
def test_what_cannot_be_required_is_told_before_training(
    run_stage: RunStage, digits_data: Artifact[DatasetSpec], required: dict[str, float], told: str
) -> None:
    config = TrainConfig(model={"architecture": "no.such.module:net"}, required=required)
    with pytest.raises(ConfigInvalid) as caught:
        run_stage(stage.run, config, data=digits_data)
    assert told in str(caught.value)


def test_a_loss_that_is_not_finite_ends_it(run_stage: RunStage, digits_data: Artifact[DatasetSpec]) -> None:
    with pytest.raises(StageFailed, match=r"no longer finite in epoch 1.*-> lower learning_rate"):
        run_stage(stage.run, TrainConfig(model=CNN, learning_rate=1e9), data=digits_data)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"architecture": "vit"}, "does not take images of 1x8x8"),
        ({"architecture": "cnn", "arguments": {"widht": 4}}, "widht"),
        ({"architecture": "vit", "arguments": {"dim": 30}}, "dim 30"),
        ({"architecture": "no.such.module:net"}, "No module named 'no'"),
        ({"architecture": "hpml.models.cnn:nothing"}, "nothing"),
        ({"architecture": "json:loads"}, "cannot build the model"),
        ({"architecture": "wrong_net:Wrong"}, "makes (2, 1, 8, 8) of 2 images"),
        ({"architecture": "wrong_net:broken"}, "ZeroDivisionError"),
        ({"architecture": "wrong_net:number"}, "returned a int"),
        ({"architecture": "wrong_net:frozen"}, "nothing to train: none of its weights has requires_grad"),
        ({"architecture": "wrong_net:weightless"}, "nothing to train"),
    ],
)
def test_a_network_that_does_not_fit_is_one_clear_line(
    run_stage: RunStage,
    digits_data: Artifact[DatasetSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    told: str,
) -> None:
    (tmp_path / "wrong_net.py").write_text(
        "from torch import nn\n"
        "class Wrong(nn.Conv2d):\n"
        "    def __init__(self, in_channels, num_classes): super().__init__(1, 1, 3, padding=1)\n"
        "def broken(**given): 1 / 0\n"
        "def number(**given): return 1\n"
        "def frozen(**given): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)\n"
        "def weightless(**given): return nn.Sequential(nn.AdaptiveAvgPool2d((2, 5)), nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigInvalid) as caught:
        run_stage(stage.run, TrainConfig(model=model), data=digits_data)
    assert told in str(caught.value)


def test_lazy_and_frozen_layers_go_through_training_and_pruning(
    run_stage: RunStage,
    digits_data: Artifact[DatasetSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes that are found with the first image; layers that stay as they are."""
    (tmp_path / "lazy_net.py").write_text(
        "from torch import nn\n"
        "def net(in_channels, num_classes):\n"
        "    frozen = nn.Conv2d(in_channels, 16, 3, padding=1).requires_grad_(False)\n"
        "    lazy = nn.LazyConv2d(32, 3, stride=2), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten()\n"
        "    return nn.Sequential(frozen, *lazy, nn.LazyLinear(num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig(model={"architecture": "lazy_net:net"}, epochs=1, ema_decay=0.9)
    trained = run_stage(stage.run, config, data=digits_data)
    assert trained.spec.parameters == 16 * 10 + 32 * (16 * 9 + 1) + 64 + 10 * (32 * 9 + 1)
    torch.manual_seed(config.seed)
    frozen = models.build(trained.spec.architecture, task_of(digits_data.spec.task))[0]
    again = models.load(trained)
    assert torch.equal(again[0].weight, frozen.weight)
    pruned = run_stage(compress.run, Prune(), model=trained, teacher=trained, data=digits_data)
    assert pruned.spec.parameters < trained.spec.parameters
    assert isinstance(models.load(pruned), nn.Module)


def test_too_few_images_for_a_share_each(run_stage: RunStage, digits_data: Artifact[DatasetSpec]) -> None:
    with pytest.raises(ConfigInvalid, match="1257 images are too few for 2048 shares"):
        run_stage(stage.run, TrainConfig(model=CNN, batch_size=2048, accumulate=2048), data=digits_data)
