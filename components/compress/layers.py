"""The layers that a user's list names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from components.errors import ConfigInvalid


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


def is_within(layer: str, names: Iterable[str]) -> bool:
    """Whether `layer` is one of `names`, or inside a module that is."""
    return any(layer == name or layer.startswith(f"{name}.") for name in names)
