"""Train a network on a dataset, in one process or in many."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from components import hardware, models
from components.artifacts import Artifact, DatasetSpec, ModelSpec
from components.contract import BareName, Config, Output, Result
from components.errors import ConfigInvalid
from components.training.config import Hyperparameters


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
    nproc: int = Field(default=1, ge=1, le=64)  # workers on this machine, which share each batch
    min_accuracy: float | None = Field(default=None, gt=0, le=1)  # top-1; a network below it is rejected

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.batch_size % (self.nproc * self.accumulate):
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of nproc x accumulate ="
                f" {self.nproc} x {self.accumulate}"
            )
        return self

    def unmet(self) -> str:
        """Why this machine cannot train so; empty if it can."""
        gpus = len(hardware.gpu_names())
        if self.device != "cpu" and self.nproc > gpus > 0:
            return (
                f"nproc is {self.nproc}, this machine has {gpus} GPU(s) and each worker needs its own;"
                " lower nproc or set device: cpu"
            )
        return super().unmet()


def run(config: TrainConfig, *, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]:
    """Train, and write `model.safetensors` and `history.json`.

    Resumes from the checkpoints of an interrupted attempt in `out.scratch`. Raises StageFailed if the loss
    is no longer finite, ConfigInvalid if the network does not take the images, Terminated after SIGTERM.
    """
    from components.training.distributed import in_group

    if config.nproc > 1 and not in_group():  # in a group, its starter has said how many
        from components.train.workers import train_in_workers

        return train_in_workers(config, data, out)
    from components.train.local import train

    return train(config, data, out)
