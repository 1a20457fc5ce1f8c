"""A network that is being trained: what one step does to it, and everything that steps change."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpml.training.config import Hyperparameters
from hpml.training.data_parallel import data_parallel
from hpml.training.device import ComputeDevice
from hpml.training.losses import Distillation
from hpml.training.optimizers import build_optimizer
from hpml.training.stopwatch import Stopwatch


class Learner:
    """A network with its optimizer, the average of its weights, and a copy of the teacher, if there is one.

    workers: how many equal copies of it learn together, each from a share of every batch. stopwatch: told of
    the phases "compute" and "communication" (a wait for gradients that the backward pass did not hide).
    """

    def __init__(
        self,
        model: nn.Module,
        config: Hyperparameters,
        compute_device: ComputeDevice,
        stopwatch: Stopwatch,
        workers: int,
        distillation: Distillation | None = None,
    ) -> None:
        self._config, self._compute_device, self._stopwatch = config, compute_device, stopwatch
        self.model = compute_device.put(model.train())
        self._distillation = distillation
        self.teacher = (
            compute_device.put(copy.deepcopy(distillation.teacher).eval()) if distillation else None
        )
        self._average = _average(self.model, config.ema_decay) if config.ema_decay else None
        self._optimizer = build_optimizer(self.model, config)
        self._scaler = torch.amp.GradScaler(
            compute_device.device.type, enabled=compute_device.dtype == torch.float16
        )
        self._network = self.model
        if workers > 1:
            self._network = data_parallel(
                self.model,
                compute_device.device,
                static_graph=config.accumulate == 1,
                on_bucket=lambda: stopwatch.lap("compute"),
            )

    def accumulate_gradients(
        self, x: Tensor, labels: Tensor, *, share: float, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Add `share` times the gradients of a part of a batch; the `last` part averages them over the group.

        Returns `share` times the part's mean loss, and how many of its images were recognised.
        """
        network = self._network
        with nullcontext() if last or not isinstance(network, DistributedDataParallel) else network.no_sync():
            logits = self._forward(network, x)
            loss = self._loss(logits, labels, x) * share
            torch.autograd.backward(self._scaler.scale(loss))
        self._stopwatch.lap("communication" if last and network is not self.model else "compute")
        return loss.detach(), (logits.argmax(dim=1) == labels).sum()

    def step(self, learning_rate: float) -> None:
        """Change the weights by the gradients added up."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        if self._average is not None:
            self._average.update_parameters(self.model)
        self._stopwatch.lap("compute")

    def leave_group(self) -> None:
        """Stop sharing gradients: the group must not be outlived by what uses it."""
        self._network = self.model

    def result(self) -> nn.Module:
        """The network that would be handed over now: the averaged one, where there is an average."""
        return self.model if self._average is None else self._average.module

    def _loss(self, logits: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits, labels, label_smoothing=self._config.label_smoothing)
        if self.teacher is None or self._distillation is None:
            return loss
        with torch.no_grad():
            teacher_logits = self._forward(self.teacher, x)
        return self._distillation.loss(logits, teacher_logits, loss)

    def _forward(self, network: nn.Module, x: Tensor) -> Tensor:
        dtype = self._compute_device.dtype
        with torch.autocast(self._compute_device.device.type, dtype, enabled=dtype != torch.float32):
            logits: Tensor = network(x)
        return logits.float()

    # ------------------------------------------------------------------------------------ for checkpoints

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that training has changed: tensors by name, and the few numbers of the loss scaler."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self._average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self._average.state_dict().items()}
        for index, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
        return tensors, self._scaler.state_dict()

    def restore(self, tensors: dict[str, Tensor], scaler_state: dict[str, Any]) -> None:
        """Put back what `state` gave, in place and in the memory layout of the parameters."""
        self.model.load_state_dict(_under("model.", tensors))
        if self._average is not None:
            self._average.load_state_dict(_under("average.", tensors))
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            parameter = parameters[int(index)]
            if tensor.shape == parameter.shape:
                tensor = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
            state.setdefault(int(index), {})[key] = tensor
        param_groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        self._scaler.load_state_dict(scaler_state)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _average(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of the weights that forgets faster at first, for short trainings."""

    def blend(average: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
        if not average.is_floating_point():
            return current
        return average.lerp(current, 1 - min(decay, float((1 + count) / (10 + count))))

    return AveragedModel(model, avg_fn=blend, use_buffers=True)
