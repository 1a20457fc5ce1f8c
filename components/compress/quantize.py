"""Static int8 quantization, described for the exporters: the weights of the model stay fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import QuantizationSpec
from hpml.components.compress.base import Method, Network
from hpml.core.contract import Output

if TYPE_CHECKING:
    from torch import nn


class Quantize(Method):
    """Weights int8 and symmetric, activations 8 bits in ranges calibrated on training data."""

    method: Literal["quantize"] = "quantize"
    weights: Literal["int8-per-channel", "int8-per-tensor"] = "int8-per-channel"
    activations: Literal["auto", "uint8", "int8"] = "auto"  # auto: the faster where the engine is built
    # minmax: all calibrated values fit; percentile: 99.999 % of them, outliers are clipped (and the exporter
    # holds all activations of the calibration rows in memory)
    calibration: Literal["minmax", "percentile"] = "minmax"
    calibration_samples: int = Field(
        default=256, ge=1, le=65_536
    )  # rows of the train split, of images as many of each class as there are
    excluded_layers: tuple[str, ...] = ()  # stay fp32; a layer, or a module with all its layers
    seed: int = Field(default=0, ge=0)  # of the draw of the calibration rows

    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The network with its quantization spec. Raises ConfigInvalid for an unknown excluded layer."""
        from hpml.components.compress.layers import require_layers

        require_layers(network.module, self.excluded_layers, where="quantize.excluded_layers")
        rows = network.task.calibration_rows(data, self.calibration_samples, self.seed)
        return replace(
            network,
            quantization=QuantizationSpec(
                scheme="static",
                weights=self.weights,
                activations=self.activations,
                calibration=self.calibration,
                calibration_rows=tuple(rows.tolist()),
                excluded_layers=self.excluded_layers,
            ),
        )
