"""What can be set about a training, whatever it trains. Does not import torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpml.core import hardware
from hpml.core.contract import Config
from hpml.tasks.image_classification.augment_options import Augment


class Hyperparameters(Config):
    """How a network is trained. The defaults do well on small sets of small images.

    augment is for tasks that augment their rows; others have nothing to change at random.
    """

    epochs: int = Field(default=8, ge=1, le=10_000)
    batch_size: int = Field(default=64, ge=1, le=10_000_000)  # rows per optimizer step, over all workers
    accumulate: int = Field(default=1, ge=1)  # parts of a worker's share; a stop waits for one or two
    optimizer: Literal["sgd", "adamw", "lars", "muon"] = "sgd"
    learning_rate: float | None = Field(default=None, gt=0)  # at its peak; None: what suits the optimizer
    momentum: float = Field(default=0.9, ge=0, lt=1)  # in adamw the first beta
    weight_decay: float | None = Field(default=None, ge=0)  # not of norms and biases; None: as above
    schedule: Literal["one-cycle", "cosine"] = "one-cycle"
    warmup_epochs: float | None = Field(default=None, ge=0)  # None: 30 % of a one-cycle, 5 % of a cosine
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)  # of the averaged weights; None: no average
    augment: Augment = Augment()
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"  # auto: mixed where the hardware gains by it
    channels_last: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every_s: float = Field(default=20.0, ge=0)  # what a kill can lose; 0: after each step
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of accumulate {self.accumulate}"
            )
        if self.epochs and self.warmup_epochs is not None and self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} leaves nothing of {self.epochs} epochs")
        return self

    def unsupported_reason(self) -> str:
        """Why this machine cannot train so; empty if it can."""
        gpus = hardware.gpu_names()
        if self.device == "cuda" and not gpus:
            return "device is cuda and this machine has no NVIDIA GPU; set device: cpu or auto"
        if self.device == "cuda" or (gpus and self.device == "auto"):
            return ""  # which precisions a GPU has is known when the training starts and asks its driver
        if self.precision == "fp16":
            return "precision is fp16, which needs a GPU; set precision: auto or fp32"
        if self.precision == "bf16" and not {"avx512_bf16", "amx_bf16"} & set(hardware.cpu_flags()):
            return "precision is bf16, which this CPU only emulates; set precision: auto or fp32"
        return ""
