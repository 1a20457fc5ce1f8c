"""int8 arithmetic simulated in torch: what a quantized network answers, before any engine exists.

Inputs and weights of convolutions and linear layers are rounded to the grids that an exporter will use. An
engine also rounds what flows between other layers, so its own accuracy, measured at its export, counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpml.artifacts.model import QuantizationSpec
from hpml.components.compress.layers import is_within
from hpml.tasks.images import batches

PERCENTILE = 99.999  # of the calibrated values, as ONNX Runtime's percentile calibration has it
_BINS = 2048
_LAYERS = (nn.Conv2d, nn.Linear)


@dataclass
class _Observed:
    """The range of a layer's inputs, and a histogram of them over that range once it is known."""

    low: float = 0.0  # ranges include 0, so that padding is exact
    high: float = 0.0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS))

    def widen(self, x: Tensor) -> None:
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def count(self, x: Tensor) -> None:
        self.histogram += torch.histc(x, _BINS, self.low, self.high)

    def clip(self) -> None:
        """Narrow the range to PERCENTILE of the counted values."""
        share = self.histogram.cumsum(0) / self.histogram.sum()
        tail = (1 - PERCENTILE / 100) / 2
        edges = torch.linspace(self.low, self.high, _BINS + 1)
        low = float(edges[int((share <= tail).sum())])
        high = float(edges[min(int((share < 1 - tail).sum()) + 1, _BINS)])
        self.low, self.high = min(low, 0.0), max(high, 0.0)


def simulate_int8(network: nn.Module, spec: QuantizationSpec, calibration_x_nchw: Tensor) -> nn.Module:
    """A copy of `network` whose convolutions and linear layers compute as if in int8."""
    simulated = copy.deepcopy(network).eval()
    layers = {
        name: layer
        for name, layer in simulated.named_modules()
        if isinstance(layer, _LAYERS) and not is_within(name, spec.excluded_layers)
    }
    observed = {name: _Observed() for name in layers}
    _feed(simulated, layers, calibration_x_nchw, lambda name, x: observed[name].widen(x))
    if spec.calibration == "percentile":
        _feed(simulated, layers, calibration_x_nchw, lambda name, x: observed[name].count(x))
        for ranges in observed.values():
            ranges.clip()
    folded = _folded_norms(simulated, calibration_x_nchw[:1])
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(_quantized_weight(layer, folded.get(layer), spec))
            layer.register_forward_pre_hook(_input_quantizer(observed[name]))
    return simulated


@torch.no_grad()
def _feed(
    network: nn.Module, layers: Mapping[str, nn.Module], x_nchw: Tensor, see: Callable[[str, Tensor], None]
) -> None:
    """Run `network` over `x_nchw`; `see` gets the name and the input of each of `layers`."""

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _layer, inputs: see(name, inputs[0])

    hooks = [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers.items()]
    for part in batches(len(x_nchw), 32):
        network(x_nchw[part])
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def _folded_norms(network: nn.Module, x_nchw: Tensor) -> dict[nn.Module, nn.BatchNorm2d]:
    """The batch norm that directly follows a convolution: an exporter folds it into the weights."""
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # holds the tensors, so that no id is used twice
    folded: dict[nn.Module, nn.BatchNorm2d] = {}

    def after_convolution(layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        made[id(output)] = (layer, output)

    def before_norm(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in made and isinstance(norm, nn.BatchNorm2d):
            folded[made[id(inputs[0])][0]] = norm

    hooks = [
        layer.register_forward_hook(after_convolution)
        if isinstance(layer, nn.Conv2d)
        else layer.register_forward_pre_hook(before_norm)
        for layer in network.modules()
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d)
    ]
    network(x_nchw)
    for hook in hooks:
        hook.remove()
    return folded


def _quantized_weight(layer: nn.Module, norm: nn.BatchNorm2d | None, spec: QuantizationSpec) -> Tensor:
    """The weights of `layer` rounded to int8 as an exporter does it, after folding `norm` into them."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    factor = torch.ones(len(weight))
    if norm is not None and norm.running_var is not None:
        gamma = factor if norm.weight is None else norm.weight
        factor = gamma / torch.sqrt(norm.running_var + norm.eps)
    factor = factor.reshape(-1, *[1] * (weight.dim() - 1))
    folded = weight * factor
    largest = folded.abs().flatten(1).amax(dim=1)
    if spec.weights == "int8-per-tensor":
        largest = largest.max().expand_as(largest)
    scale = (largest / 127).clamp(min=1e-12)
    zero_point = torch.zeros(len(weight), dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(folded, scale, zero_point, 0, -127, 127)
    return torch.where(factor == 0, weight, rounded / factor)


def _input_quantizer(observed: _Observed) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that rounds a layer's input to 256 steps of its calibrated range."""
    scale = max((observed.high - observed.low) / 255, 1e-12)
    zero_point = round(-observed.low / scale)

    def quantize(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.fake_quantize_per_tensor_affine(inputs[0], scale, zero_point, 0, 255), *inputs[1:])

    return quantize
