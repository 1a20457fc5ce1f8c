"""The small network, pruned once, and networks of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import Prune
from hpml.components.compress import stage as compress


@pytest.fixture(scope="session")
def pruned(
    run_stage_once: Callable[..., Artifact[Any]],
    digits_data: Artifact[DatasetSpec],
    small_model: Artifact[ModelSpec],
) -> Artifact[ModelSpec]:
    """The small network without half of its channels, not fine-tuned."""
    return run_stage_once(compress.run, Prune(), model=small_model, teacher=small_model, data=digits_data)


class Convolutions(nn.Module):
    """A stem, then what `self.body` and `self.head` of a subclass make of it; 8x8 images of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(32, 10)


class Flattening(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(16, 16, 3, 2, 1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).relu().flatten(1))


class Depthwise(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 3, 2, 1, groups=16)
        self.pointwise = nn.Conv2d(16, 32, 1)
        self.head = nn.Conv2d(32, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pointwise(self.depthwise(self.stem(x))).relu()).mean(dim=(2, 3))


class Grouped(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(16, 32, 3, 2, 1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).relu().mean(dim=(2, 3)))


class Concatenating(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(16, 16, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return torch.log_softmax(self.head(torch.cat([y, self.body(y)], dim=1).mean(dim=(2, 3))), dim=1)


class Gated(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        gate = self.excite(self.squeeze(y.mean(dim=(2, 3), keepdim=True)).relu()).sigmoid()
        return self.head((y * gate).mean(dim=(2, 3)))


NETWORKS: tuple[type[Convolutions], ...] = (Flattening, Depthwise, Grouped, Concatenating, Gated)


@pytest.fixture(params=NETWORKS, ids=lambda network: network.__name__)
def network_type(request: pytest.FixtureRequest) -> type[Convolutions]:
    """One of the shapes that channels can be shared in."""
    return request.param
