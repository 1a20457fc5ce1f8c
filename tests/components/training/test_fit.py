"""fit and evaluate, called as a compression method calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.core.contract import Output
from hpml.models.vit import Vit
from hpml.tasks.images import load_split, top1_accuracy
from hpml.training import learner, loop
from hpml.training.config import Augment, Hyperparameters
from hpml.training.device import CPU_FP32
from hpml.training.distributed import Group
from hpml.training.learner import Learner
from hpml.training.loop import evaluate, fit
from hpml.training.losses import Distillation
from hpml.training.stopwatch import Stopwatch

Data = Artifact[DatasetSpec]
Model = Artifact[ModelSpec]
STILL = Augment(shift=0, rotation_degrees=0, scale=0)


def fitted(model: nn.Module, data: Data, trained: Model, folder: Path, config: Any, **more: Any) -> nn.Module:
    folder.mkdir()
    result = fit(model, data, trained.spec.input, config, Output(folder, folder / "scratch"), **more)
    assert not result.model.training
    return result.model


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


def test_parts_of_a_batch_add_up_to_it(digits_data: Data, small_model: Model, tmp_path: Path) -> None:
    """With layer norm, which does not look at the other images of a batch."""
    torch.manual_seed(0)
    network = Vit(in_channels=1, num_classes=10, image_size=8, patch=4, dim=16, depth=1, heads=2)
    whole, parts = (
        fitted(
            copy.deepcopy(network),
            digits_data,
            small_model,
            tmp_path / str(accumulate),
            Hyperparameters(epochs=2, learning_rate=0.05, accumulate=accumulate),
        )
        for accumulate in (1, 8)
    )
    assert (weights(whole) - weights(parts)).abs().max() < 1e-3
    assert (weights(whole) - weights(network)).abs().max() > 0.05


def test_a_student_comes_closer_to_its_teacher(digits_data: Data, small_model: Model, tmp_path: Path) -> None:
    teacher = models.load(small_model)
    before = weights(teacher)
    target = evaluate(teacher, digits_data, small_model.spec.input)

    def distance(weight: float) -> float:
        torch.manual_seed(0)
        student = models.build(small_model.spec.architecture, in_channels=1, num_classes=10)
        distillation = Distillation(teacher, temperature=4.0, weight=weight)
        config = Hyperparameters(epochs=4)
        folder = tmp_path / str(weight)
        student = fitted(student, digits_data, small_model, folder, config, distillation=distillation)
        logits = evaluate(student, digits_data, small_model.spec.input)
        return float(np.abs(softened(logits) - softened(target)).mean())

    assert distance(1.0) < 0.7 * distance(0.0)
    assert torch.equal(weights(teacher), before)
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def softened(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits / 4).softmax(1).numpy()


def test_distillation_from_the_same_logits_pulls_nowhere() -> None:
    logits = torch.randn(5, 10, requires_grad=True)
    from_teacher, from_labels = (
        Distillation(nn.Identity(), temperature=2.0, weight=weight).loss(
            logits, logits.detach(), torch.tensor(3.0)
        )
        for weight in (1.0, 0.0)
    )
    assert from_teacher.item() == pytest.approx(0, abs=1e-6)
    assert from_labels == 3.0


def test_the_gradient_of_distillation_keeps_its_size_over_temperatures() -> None:
    """Hinton et al.: for high temperatures it tends to (student - teacher) / classes."""
    student = torch.randn(1, 10, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 10, dtype=torch.float64)
    distillation = Distillation(nn.Identity(), temperature=1000.0, weight=1.0)
    distillation.loss(student, teacher, torch.tensor(0.0)).backward()
    expected = (student - student.mean()) - (teacher - teacher.mean())
    assert student.grad is not None
    assert torch.allclose(student.grad, expected.detach() / 10, rtol=0.02, atol=1e-4)


def test_the_average_is_what_is_handed_over(digits_data: Data, small_model: Model, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = Hyperparameters(epochs=1, ema_decay=0.9, augment=STILL)
    averaged = fitted(network, digits_data, small_model, tmp_path / "a", config)
    assert averaged is not network
    assert not torch.equal(weights(averaged), weights(network))


def test_an_average_forgets_as_fast_as_asked() -> None:
    network = nn.Linear(1, 1, bias=False)
    config = Hyperparameters(ema_decay=0.5, momentum=0, learning_rate=1.0, weight_decay=0)
    learner = Learner(
        network,
        config,
        CPU_FP32,
        Stopwatch(torch.device("cpu")),
        workers=1,
    )
    seen = []
    for _ in range(40):
        network.weight.grad = torch.full((1, 1), -1.0)  # the weight grows by 1 a step
        learner.step(1.0)
        seen.append(float(network.weight.detach() - learner.result().weight.detach()))
    assert seen[0] == 0
    assert seen[-1] == pytest.approx(1.0, abs=1e-3)  # the lag of an average of decay d is d / (1 - d) steps


def test_evaluate_agrees_with_the_model_and_leaves_it_as_it_was(
    digits_data: Data, small_model: Model
) -> None:
    network = models.load(small_model).train()
    logits = evaluate(network, digits_data, small_model.spec.input)
    assert network.training
    _, labels = load_split(digits_data, "test")
    assert logits.shape == (360, 10)
    assert top1_accuracy(logits, labels) == pytest.approx(small_model.spec.accuracy_top1, abs=0.003)


def test_training_leaves_the_callers_random_numbers_alone(
    digits_data: Data, small_model: Model, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    state = torch.get_rng_state()
    fitted(network, digits_data, small_model, tmp_path / "a", Hyperparameters(epochs=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_fewer_images_than_a_batch(
    digits_data: Data, small_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fitted(network, digits_data, small_model, tmp_path / "a", Hyperparameters(epochs=1, batch_size=4096))
    assert "the batch is 1437 images instead of 4096" in capsys.readouterr().out


class CountingGroup(Group):
    """Two workers, of which the other one wants and knows nothing; counts what a step would wait for."""

    blocking = asked = 0

    def all_reduce_max_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        CountingGroup.asked += 1
        return lambda: list(values)

    def sum(self, values: Sequence[float]) -> list[float]:
        CountingGroup.blocking += 1
        return [2 * value for value in values]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def broadcast_bytes(self, data: bytes | None) -> bytes | None:
        return data


def test_no_step_waits_for_the_other_workers(
    digits_data: Data, small_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the gradients, which torch's DistributedDataParallel sends while the backward pass goes on."""
    monkeypatch.setattr(loop, "joined_group", lambda: nullcontext(CountingGroup(rank=0, size=2)))
    monkeypatch.setattr(learner, "data_parallel", lambda model, *_, **__: model)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = Hyperparameters(epochs=2, batch_size=128, accumulate=2, checkpoint_every_s=3600)
    fitted(network, digits_data, small_model, tmp_path / "a", config)
    steps = 2 * (1437 // 128)
    assert CountingGroup.asked == 2 * steps + 2  # for each part, and for each batch of the evaluation
    assert (
        CountingGroup.blocking == 2 * 2 + 1
    )  # at the end of an epoch, of its evaluation, and of the training
