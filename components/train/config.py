"""What can be set about a training from the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.core import hardware
from hpml.core.contract import BareName, Config
from hpml.core.errors import ConfigInvalid
from hpml.data_files import model_folder
from hpml.data_files.model_folder import HUB, ModelFolder
from hpml.training import pretrained, weights
from hpml.training.config import Hyperparameters


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
    # Trained ones to begin with: a file of safetensors, or a folder of transformers, also at s3://BUCKET/KEY
    # or, the folder, at hf://OWNER/NAME@COMMIT.
    weights: ModelFolder | None = None
    weights_licence: str = ""  # for the record; empty: what the model card in the folder states
    epochs: int = Field(default=8, ge=0, le=10_000)  # 0: `weights` are taken as they are
    nodes: int = Field(default=1, ge=1, le=64)  # machines; on one machine, that many processes stand in
    nproc_per_node: int = Field(default=1, ge=1, le=64)  # workers on each; all of them share each batch
    min_nodes: int | None = Field(default=None, ge=1)  # a cluster may go on with so few; None: with all only
    # Metric -> how good it has to be, such as {accuracy_top1: 0.9}; a network that is worse is rejected.
    required: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _by_their_names_of_before(cls, given: Any) -> Any:
        """`min_accuracy` was of top-1, which is the metric of pictures."""
        if isinstance(given, dict) and "min_accuracy" in given:
            if "required" in given:
                raise ValueError(
                    "min_accuracy and required are both there: remove min_accuracy, which is"
                    " required: {accuracy_top1: ...} now"
                )
            fields = {name: value for name, value in given.items() if name != "min_accuracy"}
            least = given["min_accuracy"]
            return fields if least is None else {**fields, "required": {"accuracy_top1": least}}
        return given

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
    def _of_the_hub(self) -> Self:
        if str(self.weights).startswith(HUB) and self.model.architecture != pretrained.ARCHITECTURE:
            raise ValueError(f"weights at {HUB} are of a model of transformers: set model: transformers")
        return self

    @property
    def weights_folder(self) -> ModelFolder | None:
        """The folder of transformers with config and weights; None: they are a file, or there are none."""
        is_file = str(self.weights).endswith(".safetensors")
        return None if is_file or self.model.architecture != pretrained.ARCHITECTURE else self.weights

    def known_architecture(self) -> ArchitectureSpec | None:
        """The network, as far as it can be told before it is fetched; None where it is elsewhere.

        Raises ConfigInvalid if the folder that describes it cannot be used.
        """
        folder = self.weights_folder
        if isinstance(folder, str):
            return None
        if folder is not None:
            return pretrained.architecture_of(folder, self.model.arguments)
        return ArchitectureSpec(name=self.model.architecture, arguments=self.model.arguments)

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

        if problem := models.missing(self.model.architecture) or self._weights_problem():
            return problem
        workers = self.nproc_per_node if is_launched() else self.workers
        gpus = len(hardware.gpu_names())
        if self.device != "cpu" and workers > gpus > 0:
            return (
                f"nodes x nproc_per_node is {self.nodes} x {self.nproc_per_node}, this machine has {gpus}"
                f" GPU(s) and each of its {workers} workers needs its own; lower them or set device: cpu"
            )
        return super().unsupported_reason()

    def _weights_problem(self) -> str:
        if self.weights is None:
            return ""
        if self.weights_folder is not None:
            return model_folder.network_problem(self.weights_folder)
        if isinstance(self.weights, Path) and self.weights.is_dir():
            return f"{self.weights} is a folder: set model: transformers, if it is one of that library"
        return weights.unsupported_reason(self.weights)

    @property
    def reads_unpinned_data(self) -> bool:
        """Whether it begins with weights at an address that does not say which they are."""
        return self.weights is not None and not str(self.weights).startswith(HUB)

    def fingerprint(self) -> str:
        """A digest of the weights to begin with, and of the config of their network, if any."""
        if self.weights is None:
            return ""
        if self.weights_folder is not None:
            return model_folder.fingerprint(self.weights_folder, model_folder.OF_NETWORK)
        return weights.fingerprint(self.weights)
