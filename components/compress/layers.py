"""The layers that a user's list names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from hpml.components.compress.base import DoesNotApply
from hpml.core.errors import ConfigInvalid
from hpml.models.channel_plan import SIZES


def require_layers(network: nn.Module, names: Iterable[str], *, where: str) -> None:
    """Raise ConfigInvalid, with the nearest right name, if `network` has no module of one of `names`."""
    known = [name for name, _ in network.named_modules() if name]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigInvalid(
                f"{where}: the network has no layer {name!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"its layers are {', '.join(known[:8])}, ...",
            )


def require_prunable(network: nn.Module) -> None:
    """Every number that is stored has to be in a layer whose size the channel plan can say.

    Raises DoesNotApply that names the first layer for which this is not so.
    """
    kinds = ", ".join(kind.__name__ for kind in SIZES)
    for name, layer in network.named_modules():
        owns = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if owns and type(layer) not in SIZES:
            raise DoesNotApply(
                f"prune cannot prune a network with {type(layer).__name__} weights"
                + (f" (layer {name!r})" if name else ""),
                why=f"it prunes networks whose weights are all in {kinds}",
                fix="leave prune out of this model's variants; quantize and distill work on any network",
            )


def is_within(layer: str, names: Iterable[str]) -> bool:
    """Whether `layer` is one of `names`, or inside a module that is."""
    return any(layer == name or layer.startswith(f"{name}.") for name in names)
