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
from hpml.core.batches import batches
from hpml.tasks.effective_bits import effective_bits

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

    def rounded(self, x: Tensor) -> Tensor:
        """`x` on the 256 steps of the range."""
        scale = max((self.high - self.low) / 255, 1e-12)
        return torch.fake_quantize_per_tensor_affine(x, scale, round(-self.low / scale), 0, 255)

    def clip(self) -> None:
        """Narrow the range to PERCENTILE of the counted values."""
        share = self.histogram.cumsum(0) / self.histogram.sum()
        tail = (1 - PERCENTILE / 100) / 2
        edges = torch.linspace(self.low, self.high, _BINS + 1)
        low = float(edges[int((share <= tail).sum())])
        high = float(edges[min(int((share < 1 - tail).sum()) + 1, _BINS)])
        self.low, self.high = min(low, 0.0), max(high, 0.0)


def simulate_int8(
    network: nn.Module,
    spec: QuantizationSpec,
    calibration: tuple[Tensor, ...],
    *,
    least_bits: float = 0.0,
) -> nn.Module:
    """A copy of `network` whose convolutions and linear layers compute as if in int8.

    calibration: arguments of the network, for the rows that say how far its layers' inputs reach. least_bits:
    layers whose inputs would keep fewer stay as they are; see `hpml.tasks.effective_bits`.
    """
    simulated = copy.deepcopy(network).eval()
    layers = {
        name: layer
        for name, layer in simulated.named_modules()
        if isinstance(layer, _LAYERS) and not is_within(name, spec.excluded_layers)
    }
    observed = {name: _Observed() for name in layers}
    _feed(simulated, layers, calibration, lambda name, x: observed[name].widen(x))
    if spec.calibration == "percentile":
        _feed(simulated, layers, calibration, lambda name, x: observed[name].count(x))
        for ranges in observed.values():
            ranges.clip()
    if least_bits:
        kept = _bits_kept(simulated, layers, observed, calibration)
        layers = {name: layer for name, layer in layers.items() if kept[name] >= least_bits}
    folded = _folded_norms(simulated, tuple(tensor[:1] for tensor in calibration))
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(_quantized_weight(layer, folded.get(layer), spec))
            layer.register_forward_pre_hook(_input_quantizer(observed[name]))
    return simulated


@torch.no_grad()
def _feed(
    network: nn.Module,
    layers: Mapping[str, nn.Module],
    features: tuple[Tensor, ...],
    see: Callable[[str, Tensor], None],
) -> None:
    """Run `network` over `features`; `see` gets the name and the input of each of `layers`."""

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _layer, inputs: see(name, inputs[0])

    hooks = [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers.items()]
    for part in batches(len(features[0]), 32):
        network(*(tensor[part] for tensor in features))
    for hook in hooks:
        hook.remove()


def _bits_kept(
    network: nn.Module,
    layers: Mapping[str, nn.Module],
    observed: Mapping[str, _Observed],
    features: tuple[Tensor, ...],
) -> dict[str, float]:
    """The effective bits that the inputs of each of `layers` keep."""
    noise = {name: torch.zeros(2, dtype=torch.float64) for name in layers}

    def see(name: str, x: Tensor) -> None:
        error = observed[name].rounded(x) - x
        signal, lost = (each.double().square().sum(dim=-1) for each in (x, error))
        shares = lost[signal > 0] / signal[signal > 0]
        noise[name] += torch.stack([shares.sum(), torch.ones_like(shares).sum()])

    _feed(network, layers, features, see)
    return {name: effective_bits(float(shares / rows.clamp(min=1))) for name, (shares, rows) in noise.items()}


@torch.no_grad()
def _folded_norms(network: nn.Module, features: tuple[Tensor, ...]) -> dict[nn.Module, nn.BatchNorm2d]:
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
    network(*features)
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

    def quantize(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (observed.rounded(inputs[0]), *inputs[1:])

    return quantize
