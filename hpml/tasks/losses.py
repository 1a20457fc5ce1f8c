"""Losses that several tasks use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def softened_divergence(logits: Tensor, of_teacher: Tensor, temperature: float) -> Tensor:
    """How far softened distributions are from a teacher's (Hinton et al. 2015, arXiv:1503.02531).

    Logits are (rows, classes). The square of the temperature keeps the gradient's size independent of it.
    """
    return temperature**2 * functional.kl_div(
        torch.log_softmax(logits / temperature, dim=1),
        torch.log_softmax(of_teacher / temperature, dim=1),
        reduction="batchmean",
        log_target=True,
    )
