"""A trained network, as `train` and `compress` write it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from hpml.artifacts.dataset import of_images
from hpml.artifacts.operation import Operation
from hpml.core.contract import Config


class ArchitectureSpec(Config):
    """How to build a network before its channel plan: a name of ours or `package.module:callable`."""

    name: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class WeightsOrigin(Config):
    """Where trained weights that a training began with are from.

    source: the name of the file or folder, or its address. sha256: of each file that was read, by its name.
    """

    source: str
    licence: str
    sha256: dict[str, str]

    def in_words(self) -> str:
        """Such as "smollm, licence apache-2.0"."""
        return f"{self.source}, licence {self.licence}"


class QuantizationSpec(Config):
    """What an exporter has to quantize, and with which samples of the train split it calibrates."""

    scheme: Literal["static"]
    weights: Literal["int8-per-channel", "int8-per-tensor"]
    activations: Literal["auto", "uint8", "int8"]  # auto: the benchmark chooses
    calibration: Literal["minmax", "percentile"]
    calibration_rows: tuple[int, ...]
    excluded_layers: tuple[str, ...] = ()


class ModelSpec(Config):
    """A trained network: `model.safetensors`, and `history.json` with the curves of its training.

    `channel_plan` maps a layer's name to the sizes it has after pruning, for example
    {"layer1.0.conv1": {"in_channels": 16, "out_channels": 8}}; None where nothing was removed.
    One that is "not built", because a method does not apply to its network, has no files and no figures.
    """

    kind: Literal["model"] = "model"
    status: Literal["built", "not built"] = "built"
    reason: str = ""  # why it was not built
    architecture: ArchitectureSpec
    task: dict[str, JsonValue]  # see `hpml.tasks`
    operations: tuple[Operation, ...]  # what can be asked of it; goals judge the first
    origin: WeightsOrigin | None = None  # None: it began at random
    methods: tuple[str, ...] = ()
    channel_plan: dict[str, dict[str, int]] | None = None
    quantization: QuantizationSpec | None = None
    parameters: int
    macs: int  # multiply-accumulates for one row
    # Metric -> its value, of the network in torch, on the validation split; none where it is not built.
    quality: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        return of_images(given)
