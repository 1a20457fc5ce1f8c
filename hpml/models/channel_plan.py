"""The channel plan: the sizes of every layer that pruning changed, enough to rebuild the pruned network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hpml.core.errors import StageFailed

# Which attributes say the size of a layer, and which tensors have that size. Conv weights are
# (out, in / groups, *kernel), linear weights (out, in), norm tensors (features,).
SIZES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: ("in_channels", "out_channels", "groups"),
    nn.Linear: ("in_features", "out_features"),
    nn.BatchNorm2d: ("num_features",),
}


def layer_sizes(model: nn.Module) -> dict[str, dict[str, int]]:
    """The sizes of every layer of a kind that can be pruned, by the layer's name."""
    return {
        name: {size: int(getattr(layer, size)) for size in SIZES[type(layer)]}
        for name, layer in model.named_modules()
        if type(layer) in SIZES
    }


def channel_plan(before: Mapping[str, Mapping[str, int]], pruned: nn.Module) -> dict[str, dict[str, int]]:
    """The layers of `pruned` whose sizes differ from `before` (see `layer_sizes`)."""
    return {name: sizes for name, sizes in layer_sizes(pruned).items() if sizes != before[name]}


def apply_channel_plan(model: nn.Module, plan: Mapping[str, Mapping[str, int]]) -> None:
    """Give the layers of `model` the sizes of `plan`, in place; their weights become uninitialised.

    Raises StageFailed if the plan names a layer or a size that the model does not have.
    """
    layers = dict(model.named_modules())
    for name, sizes in plan.items():
        layer = layers.get(name)
        if layer is None or type(layer) not in SIZES or set(sizes) != set(SIZES[type(layer)]):
            raise StageFailed(f"the channel plan does not fit the network at layer {name!r}")
        for size, value in sizes.items():
            if not 0 < value <= getattr(layer, size):
                raise StageFailed(f"the channel plan has {size} = {value} at layer {name!r}")
            setattr(layer, size, value)
        _reallocate(layer)


def _reallocate(layer: nn.Module) -> None:
    shapes: dict[str, tuple[int, ...]]
    if isinstance(layer, nn.Conv2d):
        kernels = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
        shapes = {"weight": kernels, "bias": kernels[:1]}
    elif isinstance(layer, nn.Linear):
        shapes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    elif isinstance(layer, nn.BatchNorm2d):
        tensors = ("weight", "bias", "running_mean", "running_var")
        shapes = dict.fromkeys(tensors, (layer.num_features,))
    for name, shape in shapes.items():
        old = getattr(layer, name)
        if old is not None:
            new = torch.empty(shape, dtype=old.dtype)
            setattr(layer, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
