"""What can be set about a training from the recipe."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from hpml import models
from hpml.core import hardware
from hpml.core.contract import BareName, Config
from hpml.core.errors import ConfigInvalid
from hpml.training import weights
from hpml.training.config import Hyperparameters
from hpml.training.weights import WeightsFile


class ModelConfig(Config):
    """Which network: one of ours by name, or a user's own as `package.module:callable`."""

    architecture: str = "resnet18"
    arguments: dict[str, JsonValue] = Field(default_factory=dict)  # passed to the callable, such as width

    @field_validator("architecture")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            models.import_path(name)
        except ConfigInvalid as error:
            raise ValueError(str(error)) from None
        return name


class TrainConfig(Hyperparameters):
    """A network and how to train it; a bare string as `model` stands for the architecture."""

    model: Annotated[ModelConfig, BareName("architecture")] = ModelConfig()
    weights: WeightsFile | None = None  # trained ones to begin with: safetensors, also at s3://BUCKET/KEY
    epochs: int = Field(default=8, ge=0, le=10_000)  # 0: `weights` are taken as they are
    nodes: int = Field(default=1, ge=1, le=64)  # machines; on one machine, that many processes stand in
    nproc_per_node: int = Field(default=1, ge=1, le=64)  # workers on each; all of them share each batch
    min_nodes: int | None = Field(default=None, ge=1)  # a cluster may go on with so few; None: with all only
    min_accuracy: float | None = Field(default=None, gt=0, le=1)  # top-1; a network below it is rejected

    @property
    def workers(self) -> int:
        """All of them, on all nodes."""
        return self.nodes * self.nproc_per_node

    @model_validator(mode="after")
    def _trained(self) -> Self:
        if self.epochs == 0 and self.weights is None:
            raise ValueError("epochs 0 trains nothing: set epochs, or `weights` to a file of trained ones")
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        """For every number of nodes that may train: an elastic training goes on when one is lost."""
        fewest = self.nodes if self.min_nodes is None else self.min_nodes
        if fewest > self.nodes:
            raise ValueError(f"min_nodes {fewest} is more than nodes {self.nodes}")
        for nodes in range(fewest, self.nodes + 1):
            if self.batch_size % (nodes * self.nproc_per_node * self.accumulate):
                elastic = f" (min_nodes {fewest}: so many may train)" if nodes < self.nodes else ""
                raise ValueError(
                    f"batch_size {self.batch_size} is not a multiple of nodes x nproc_per_node x accumulate ="
                    f" {nodes} x {self.nproc_per_node} x {self.accumulate}{elastic}"
                )
        return self

    def unsupported_reason(self) -> str:
        """Why this machine cannot train so; empty if it can.

        A machine on which a launcher started this worker is one node; elsewhere this one stands in for all.
        """
        from hpml.training.distributed import is_launched

        if self.weights is not None and (problem := weights.unsupported_reason(self.weights)):
            return problem
        workers = self.nproc_per_node if is_launched() else self.workers
        gpus = len(hardware.gpu_names())
        if self.device != "cpu" and workers > gpus > 0:
            return (
                f"nodes x nproc_per_node is {self.nodes} x {self.nproc_per_node}, this machine has {gpus}"
                f" GPU(s) and each of its {workers} workers needs its own; lower them or set device: cpu"
            )
        return super().unsupported_reason()

    @property
    def reads_unpinned_data(self) -> bool:
        """Whether it begins with weights at an address."""
        return self.weights is not None

    def fingerprint(self) -> str:
        """A digest of the weights to begin with, if any."""
        return "" if self.weights is None else weights.fingerprint(self.weights)
