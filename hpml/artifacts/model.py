"""A trained network, as `train` and `compress` write it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from hpml.artifacts.model_input import InputSpec
from hpml.core.contract import Config


class ArchitectureSpec(Config):
    """How to build a network before its channel plan: a name of ours or `package.module:callable`."""

    name: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


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
    input: InputSpec
    class_names: tuple[str, ...]
    methods: tuple[str, ...] = ()
    channel_plan: dict[str, dict[str, int]] | None = None
    quantization: QuantizationSpec | None = None
    parameters: int
    macs: int  # multiply-accumulates for one sample
    accuracy_top1: float  # of the network in torch, on the test split
