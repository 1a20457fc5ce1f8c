"""Optimizers and the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpml.training.config import Hyperparameters
from hpml.training.optimizers import DEFAULTS, Lars, build_optimizer
from hpml.training.schedule import rate_factor


def factors(config: Hyperparameters, steps_per_epoch: int) -> list[float]:
    total = config.epochs * steps_per_epoch
    return [rate_factor(step, steps_per_epoch, config) for step in range(total)]


@given(
    schedule=st.sampled_from(["one-cycle", "cosine"]),
    epochs=st.integers(1, 20),
    steps=st.integers(1, 40),
    warmup=st.none() | st.floats(0, 0.9),
)
def test_the_rate_rises_to_its_peak_then_falls_to_almost_nothing(
    schedule: str, epochs: int, steps: int, warmup: float | None
) -> None:
    config = Hyperparameters(schedule=schedule, epochs=epochs, warmup_epochs=warmup)
    rates = factors(config, steps)
    assert all(0 < rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if len(rates) > 20:
        assert max(rates) > 0.9
    if len(rates) - top > 10:
        assert rates[-1] < 0.05


def test_the_warm_up_lasts_as_long_as_asked() -> None:
    for schedule in ("one-cycle", "cosine"):
        rates = factors(Hyperparameters(schedule=schedule, epochs=10, warmup_epochs=3), 10)
        assert rates.index(max(rates)) == 29
        assert max(rates) == 1
    assert factors(Hyperparameters(schedule="cosine", epochs=10, warmup_epochs=2), 10)[9] == 0.5
    assert factors(Hyperparameters(schedule="cosine", epochs=10, warmup_epochs=0), 10)[0] > 0.99


def test_norms_and_biases_have_no_weight_decay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    for name in DEFAULTS:
        optimizer = build_optimizer(model, Hyperparameters(optimizer=name))
        decays = {
            id(parameter): group["weight_decay"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter in model.parameters():
            assert (decays[id(parameter)] > 0) == (parameter.ndim > 1)


def test_settings_reach_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    config = Hyperparameters(optimizer="adamw", learning_rate=0.25, weight_decay=0.125, momentum=0.5)
    [weights, _] = build_optimizer(model, config).param_groups
    assert (weights["lr"], weights["weight_decay"], weights["betas"][0]) == (0.25, 0.125, 0.5)
    assert build_optimizer(model, Hyperparameters(momentum=0)).param_groups[0]["momentum"] == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_lars_step_is_in_proportion_to_the_weights_not_to_the_gradient(scale: float) -> None:
    weights = nn.Parameter(torch.full((4, 4), 2.0))
    optimizer = Lars([weights], lr=0.5, momentum=0.0, trust=0.01)
    weights.grad = torch.full((4, 4), scale)
    optimizer.step()
    assert torch.allclose(weights, torch.full((4, 4), 2.0 - 0.5 * 0.01 * 2.0))


def test_lars_counts_weight_decay_into_the_step_and_its_size() -> None:
    weights = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    weights.grad = torch.tensor([[0.6, 0.8]])
    Lars([weights], lr=1.0, momentum=0.0, weight_decay=0.1, trust=0.01).step()
    ratio = 0.01 * 5 / (1 + 0.1 * 5)
    assert torch.allclose(weights, torch.tensor([[3 - ratio * 0.9, 4 - ratio * 1.2]]))


def test_lars_without_adaptation_is_sgd_with_momentum() -> None:
    torch.manual_seed(0)
    start = torch.randn(6)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    lars = Lars([{"params": [ours], "adapt": False}], lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for _ in range(5):
        gradient = torch.randn(6)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        lars.step()
        sgd.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_lars_moves_zero_weights_and_rests_without_gradient() -> None:
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    Lars([zero, still], lr=0.1, momentum=0.0).step()
    assert torch.allclose(zero, torch.full((2, 2), -0.1))
    assert torch.equal(still, torch.ones(2, 2))
    assert all(math.isfinite(value) for value in zero.flatten().tolist())
