"""What a training minimises."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Distillation:
    """Learning from a teacher's outputs beside the data (Hinton et al. 2015, arXiv:1503.02531).

    weight: of the teacher's part; the rest is the loss of the data. temperature: softens both
    distributions, see `Task.soft_loss`.
    """

    teacher: nn.Module = field(repr=False)
    temperature: float
    weight: float
