"""Knowledge distillation: a network learns from the outputs of a better one (Hinton et al. 2015)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.compress.base import Method, Network
from hpml.core.contract import Output
from hpml.training.config import Hyperparameters

if TYPE_CHECKING:
    from torch import nn


class Distill(Hyperparameters, Method):
    """Fine-tune with the run's trained model as teacher (arXiv:1503.02531). The keys of training apply."""

    method: Literal["distill"] = "distill"
    temperature: float = Field(default=4.0, ge=1, le=100)  # softens both distributions; 1: as they are
    alpha: float = Field(default=0.9, ge=0, le=1)  # weight of the teacher; 0: plain fine-tuning

    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The network, fine-tuned; resumes from checkpoints in `out.scratch`."""
        from hpml.training.loop import fit
        from hpml.training.losses import Distillation

        distillation = Distillation(teacher, temperature=self.temperature, weight=self.alpha)
        fitted = fit(network.module, data, self, out, distillation)
        return replace(network, module=fitted.model, history=fitted.history)
