"""Optimizers and the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpml.training.config import Hyperparameters
from hpml.training.optimizers import DEFAULTS, Lars, build_optimizer, orthogonal
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


@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4)])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_a_step_of_muon_is_nearly_orthogonal_whatever_the_gradient(
    shape: tuple[int, int], scale: float
) -> None:
    torch.manual_seed(0)
    found = orthogonal(scale * torch.randn(shape))
    u, _, vt = torch.linalg.svd(found, full_matrices=False)
    singular = torch.linalg.svdvals(found)
    assert found.shape == shape and singular.min() > 0.3 and singular.max() < 1.3
    torch.testing.assert_close(orthogonal(found), u @ vt, atol=0.4, rtol=0)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.Linear(6, 9))


def test_muon_is_for_what_is_inside_and_adamw_for_the_rest() -> None:
    model = mlp()
    optimizer = build_optimizer(model, Hyperparameters(optimizer="muon", learning_rate=0.1, weight_decay=0))
    matrices, weights, others = (group["params"] for group in optimizer.param_groups)
    assert matrices == [model[1].weight, model[3].weight] and weights == [model[0].weight, model[4].weight]
    before = model[1].weight.detach().clone()
    model(torch.arange(9)).square().sum().backward()
    bias_gradient = model[1].bias.grad.clone()
    bias_before = model[1].bias.detach().clone()
    optimizer.step()
    step = (before - model[1].weight) / (0.1 * 0.2 * 12**0.5)
    singular = torch.linalg.svdvals(step)
    assert singular.min() > 0.3 and singular.max() < 1.3
    torch.testing.assert_close(model[1].bias, bias_before - 0.1 * bias_gradient.sign())
    assert len(others) == 3


def test_muon_goes_on_where_its_state_was_stored() -> None:
    config = Hyperparameters(optimizer="muon", learning_rate=0.05)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(torch.arange(9)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = mlp(), mlp(), mlp()
    steps(whole, build_optimizer(whole, config), 4)
    half = build_optimizer(first, config)
    steps(first, half, 2)
    second.load_state_dict(first.state_dict())
    other = build_optimizer(second, config)
    other.load_state_dict(half.state_dict())
    steps(second, other, 2)
    for one, expected in zip(second.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, expected, atol=0, rtol=0)
