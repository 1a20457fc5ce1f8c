"""A network that is being trained: what one step does to it, and everything that steps change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpml.tasks import Task
from hpml.training.config import Hyperparameters
from hpml.training.data_parallel import data_parallel
from hpml.training.device import ComputeDevice
from hpml.training.losses import Distillation
from hpml.training.optimizers import build_optimizer
from hpml.training.stopwatch import Stopwatch

if TYPE_CHECKING:
    from hpml.tasks.base import Outputs


class Learner:
    """A network with its optimizer, the average of its weights, and a copy of the teacher, if there is one.

    workers: how many equal copies of it learn together, each from a share of every batch. stopwatch: told of
    the phases "compute" and "communication" (a wait for gradients that the backward pass did not hide).
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: Hyperparameters,
        compute_device: ComputeDevice,
        stopwatch: Stopwatch,
        workers: int,
        distillation: Distillation | None = None,
    ) -> None:
        self._task, self._config = task, config
        self._compute_device, self._stopwatch = compute_device, stopwatch
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
        self, features: tuple[Tensor, ...], stored: Mapping[str, Tensor], *, share: float, last: bool
    ) -> Tensor:
        """Add `share` times the gradients of a part of a batch; the `last` part averages them over the group.

        stored: the arrays that the features are of. Returns float64: `share` times the part's mean loss, and
        the sums of the statistics of the task's metric.
        """
        network = self._network
        with nullcontext() if last or not isinstance(network, DistributedDataParallel) else network.no_sync():
            outputs = self._forward(network, features)
            loss = self._loss(outputs, features, stored) * share
            torch.autograd.backward(self._scaler.scale(loss))
        self._stopwatch.lap("communication" if last and network is not self.model else "compute")
        with torch.no_grad():
            statistics = self._task.statistics(outputs, stored)[self._task.metric.name]
        return torch.cat([loss.detach().double()[None], statistics.sum(dim=0)])

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

    def _loss(self, outputs: Outputs, features: tuple[Tensor, ...], stored: Mapping[str, Tensor]) -> Tensor:
        loss = self._task.loss(outputs, stored, label_smoothing=self._config.label_smoothing)
        if self.teacher is None or self._distillation is None:
            return loss
        with torch.no_grad():
            of_teacher = self._forward(self.teacher, features)
        weight, temperature = self._distillation.weight, self._distillation.temperature
        soft_loss = self._task.soft_loss(outputs, of_teacher, stored, temperature=temperature)
        return weight * soft_loss + (1 - weight) * loss

    def _forward(self, network: nn.Module, features: tuple[Tensor, ...]) -> Outputs:
        dtype = self._compute_device.dtype
        with torch.autocast(self._compute_device.device.type, dtype, enabled=dtype != torch.float32):
            outputs: Outputs = network(*features)
        if isinstance(outputs, Tensor):
            return outputs.float()
        return tuple(output.float() for output in outputs)

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
