"""A network in torch, asked as an engine is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpml.artifacts.operation import Operation
from hpml.tasks.base import Task


class TorchSession:
    """A network in evaluation mode on its device."""

    def __init__(
        self, network: nn.Module, task: Task, operations: Sequence[Operation], device: str = "cpu"
    ) -> None:
        graphs = task.graphs(network.eval().to(device))
        self.operations = {one.name: one for one in operations}
        self._graphs = {one.name: graphs[one.graph] for one in operations}
        self._device = device
        self.stream = torch.cuda.current_stream() if device == "cuda" else None

    def run(self, feeds: Mapping[str, NDArray[Any]], operation: str = "predict") -> dict[str, NDArray[Any]]:
        """The outputs of an operation by name; `feeds` has its inputs by name, the batch in front."""
        module, described = self._graphs[operation], self.operations[operation]
        arguments = [torch.from_numpy(np.asarray(feeds[one.name])) for one in described.inputs]
        with torch.inference_mode():
            answer: Tensor | tuple[Tensor, ...] = module(*(one.to(self._device) for one in arguments))
        outputs = (answer,) if isinstance(answer, Tensor) else answer
        return {
            one.name: tensor.cpu().numpy() for one, tensor in zip(described.outputs, outputs, strict=True)
        }
