"""Which optimizer, with which settings for which weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hpml.training.config import Hyperparameters

# What suits each optimizer at batch 64 to 256: the peak of the learning rate, and the weight decay.
DEFAULTS: dict[str, tuple[float, float]] = {
    "sgd": (0.1, 5e-4),
    "adamw": (1e-3, 0.05),
    "lars": (2.0, 5e-4),
}


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888).

    Each tensor's rate is scaled by trust * |w| / (|g| + weight_decay * |w|), which keeps the steps of large
    batches in proportion to the weights they change. Groups with `adapt=False` take plain momentum steps.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults | {"adapt": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, parameter.grad, group)

    def _change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        update = gradient.add(parameter, alpha=decay)
        if group["adapt"]:
            weight_norm, gradient_norm = parameter.norm(), gradient.norm()
            ratio = group["trust"] * weight_norm / (gradient_norm + decay * weight_norm)
            update *= torch.where((weight_norm > 0) & (gradient_norm > 0), ratio, 1.0)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=group["lr"])
        parameter.sub_(buffer)


def peak_learning_rate(config: Hyperparameters) -> float:
    """The largest learning rate of a training."""
    return DEFAULTS[config.optimizer][0] if config.learning_rate is None else config.learning_rate


def build_optimizer(model: nn.Module, config: Hyperparameters) -> Optimizer:
    """The optimizer of `model`'s weights; norms and biases (one dimension) have no weight decay."""
    decay = DEFAULTS[config.optimizer][1] if config.weight_decay is None else config.weight_decay
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay}
    others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
    rate = peak_learning_rate(config)
    if config.optimizer == "adamw":
        return AdamW([weights, others], lr=rate, betas=(config.momentum, 0.999), fused=True)
    if config.optimizer == "lars":
        return Lars([weights, others | {"adapt": False}], lr=rate, momentum=config.momentum)
    nesterov = config.momentum > 0
    return SGD([weights, others], lr=rate, momentum=config.momentum, nesterov=nesterov, fused=True)
