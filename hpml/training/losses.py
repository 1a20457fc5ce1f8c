"""What a training minimises."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Distillation:
    """Learning from a teacher's logits beside the labels (Hinton et al. 2015, arXiv:1503.02531).

    weight: of the teacher's part; the rest is the cross-entropy with the labels. temperature: softens both
    distributions; its square keeps the gradient's size independent of it.
    """

    teacher: nn.Module = field(repr=False)
    temperature: float
    weight: float

    def loss(self, logits: Tensor, teacher_logits: Tensor, hard_loss: Tensor) -> Tensor:
        """The loss of a batch: logits (batch, classes), and `hard_loss`, the scalar loss with the labels."""
        soft_loss = functional.kl_div(
            torch.log_softmax(logits / self.temperature, dim=1),
            torch.log_softmax(teacher_logits / self.temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        return self.weight * self.temperature**2 * soft_loss + (1 - self.weight) * hard_loss
