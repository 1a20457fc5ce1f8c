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
    "muon": (0.02, 0.1),
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


class Muon(AdamW):
    """Orthogonal steps for the groups with `orthogonal=True`, of matrices; AdamW for the others.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the step of a matrix is its momentum with
    all singular values near 1; scaled to the size of AdamW's steps (Liu et al. 2025, arXiv:2502.16982), so
    that one learning rate does for both. `torch.optim.Muon` computes in bfloat16, which many CPUs emulate.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, betas=(momentum, 0.999))
        for group in self.param_groups:
            group.setdefault("orthogonal", False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change every parameter that has a gradient; the gradients of matrices are used up."""
        for group in self.param_groups:
            for matrix in group["params"] if group["orthogonal"] else ():
                if matrix.grad is not None:
                    self._change(matrix, matrix.grad, group)
                    matrix.grad = None  # so AdamW leaves it
        super().step()

    def _change(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:  # AdamW wants to find a number of steps wherever there is a state
            state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(matrix)}
        momentum, _ = group["betas"]
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonal(gradient.lerp(buffer, momentum))  # as Nesterov looks ahead
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.sub_(update, alpha=group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U V^T of `matrix` = U S V^T, by five steps of a Newton-Schulz iteration (Jordan et al. 2024).

    Its polynomial trades exactness for speed: most singular values end between 0.7 and 1.2, small ones lower.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    result: Tensor = x.mT if is_tall else x
    return result


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
    if config.optimizer == "muon":
        inner = _inner_matrices(model)
        matrices = {"params": [p for p in trained if id(p) in inner], "orthogonal": True}
        weights["params"] = [p for p in trained if p.ndim > 1 and id(p) not in inner]
        return Muon([matrices | {"weight_decay": decay}, weights, others], lr=rate, momentum=config.momentum)
    if config.optimizer == "lars":
        return Lars([weights, others | {"adapt": False}], lr=rate, momentum=config.momentum)
    nesterov = config.momentum > 0
    return SGD([weights, others], lr=rate, momentum=config.momentum, nesterov=nesterov, fused=True)


def _inner_matrices(model: nn.Module) -> set[int]:
    """Which weights (`id`) are of linear layers, but for the last, the head, and what an embedding shares."""
    linear = [id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    return set(linear[:-1]) - {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
