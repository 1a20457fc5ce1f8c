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
from hpml.tasks import task_of
from hpml.tasks.image_classification.augment_options import Augment
from hpml.tasks.image_classification.task import ImageClassification
from hpml.tasks.losses import softened_divergence
from hpml.tasks.torch_session import TorchSession
from hpml.training import learner, loop
from hpml.training.config import Hyperparameters
from hpml.training.device import CPU_FP32
from hpml.training.distributed import Group
from hpml.training.learner import Learner
from hpml.training.loop import evaluate, fit
from hpml.training.losses import Distillation
from hpml.training.stopwatch import Stopwatch
from tests.image_tasks import image_task

Data = Artifact[DatasetSpec]
Model = Artifact[ModelSpec]
STILL = Augment(shift=0, rotation_degrees=0, scale=0)


def fitted(model: nn.Module, data: Data, folder: Path, config: Any, **more: Any) -> nn.Module:
    folder.mkdir()
    result = fit(model, data, config, Output(folder, folder / "scratch"), **more)
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
    task = task_of(digits_data.spec.task)
    images = task.stored(digits_data, "validation")

    def logits_of(network: nn.Module) -> np.ndarray:
        return task.outputs(TorchSession(network, task, task.operations(network)), images)["logits"]

    target = logits_of(teacher)

    def distance(weight: float) -> float:
        torch.manual_seed(0)
        student = models.build(small_model.spec.architecture, task)
        distillation = Distillation(teacher, temperature=4.0, weight=weight)
        config = Hyperparameters(epochs=4)
        folder = tmp_path / str(weight)
        student = fitted(student, digits_data, folder, config, distillation=distillation)
        return float(np.abs(softened(logits_of(student)) - softened(target)).mean())

    assert distance(1.0) < 0.7 * distance(0.0)
    assert torch.equal(weights(teacher), before)
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def softened(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits / 4).softmax(1).numpy()


def test_distillation_from_the_same_logits_pulls_nowhere() -> None:
    logits = torch.randn(5, 10)
    weight = torch.zeros(5, 10, requires_grad=True)
    assert softened_divergence(logits, logits, 2.0).item() == pytest.approx(0, abs=1e-6)
    softened_divergence(logits + weight, logits, 2.0).backward()
    assert weight.grad is not None and weight.grad.abs().max() < 1e-6


def test_without_weight_a_teacher_has_no_say(digits_data: Data, small_model: Model, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    deaf = Distillation(models.load(small_model), temperature=2.0, weight=0.0)
    alone, beside = (
        fitted(copy.deepcopy(network), digits_data, tmp_path / name, Hyperparameters(epochs=1), **more)
        for name, more in (("alone", {}), ("beside", {"distillation": deaf}))
    )
    assert torch.equal(weights(alone), weights(beside))


def test_the_gradient_of_distillation_keeps_its_size_over_temperatures() -> None:
    """Hinton et al.: for high temperatures it tends to (student - teacher) / classes."""
    student = torch.randn(1, 10, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 10, dtype=torch.float64)
    softened_divergence(student, teacher, 1000.0).backward()
    expected = (student - student.mean()) - (teacher - teacher.mean())
    assert student.grad is not None
    assert torch.allclose(student.grad, expected.detach() / 10, rtol=0.02, atol=1e-4)


def test_the_random_numbers_of_augmentation_cover_their_range(
    digits_data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = ImageClassification.training_features

    def noted(self: ImageClassification, stored: Any, **options: Any) -> Any:
        if options.get("uniform") is not None:
            seen.append(options["uniform"])
        return plain(self, stored, **options)

    monkeypatch.setattr(ImageClassification, "training_features", noted)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fitted(network, digits_data, tmp_path / "a", Hyperparameters(epochs=4))
    uniform = torch.cat(seen)
    assert uniform.shape == (4 * (1257 // 64 * 64), ImageClassification.draws)
    assert uniform.min() >= -1 and uniform.max() < 1
    assert uniform.mean(0).abs().max() < 0.05
    assert (uniform.std(0) - 3**-0.5).abs().max() < 0.02
    assert len(uniform.unique(dim=0)) == len(uniform)


def test_the_average_is_what_is_handed_over(digits_data: Data, small_model: Model, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = Hyperparameters(epochs=1, ema_decay=0.9, augment=STILL)
    averaged = fitted(network, digits_data, tmp_path / "a", config)
    assert averaged is not network
    assert not torch.equal(weights(averaged), weights(network))


def test_an_average_forgets_as_fast_as_asked() -> None:
    network = nn.Linear(1, 1, bias=False)
    config = Hyperparameters(ema_decay=0.5, momentum=0, learning_rate=1.0, weight_decay=0)
    learner = Learner(
        network,
        image_task(),
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
    quality = evaluate(network, digits_data)
    assert network.training
    images, labels = (np.load(digits_data.file(f"validation_{name}.npy")) for name in ("images", "labels"))
    task = digits_data.spec.task
    x_nchw = torch.from_numpy(((images / 255 - task["mean"]) / task["std"]).transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        recognised = network.eval()(x_nchw).argmax(dim=1).numpy() == labels
    assert quality == {"accuracy_top1": pytest.approx(recognised.mean(), abs=0.003)}
    assert quality == pytest.approx(small_model.spec.quality, abs=0.003)


def test_training_leaves_the_callers_random_numbers_alone(
    digits_data: Data, small_model: Model, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    state = torch.get_rng_state()
    fitted(network, digits_data, tmp_path / "a", Hyperparameters(epochs=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_fewer_images_than_a_batch(
    digits_data: Data, small_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fitted(network, digits_data, tmp_path / "a", Hyperparameters(epochs=1, batch_size=4096))
    assert "the batch is 1257 images instead of 4096" in capsys.readouterr().out


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
    fitted(network, digits_data, tmp_path / "a", config)
    steps = 2 * (1257 // 128)
    assert CountingGroup.asked == 2 * steps + 2  # for each part, and for each batch of the evaluation
    assert (
        CountingGroup.blocking == 2 * 2 + 1
    )  # at the end of an epoch, of its evaluation, and of the training
