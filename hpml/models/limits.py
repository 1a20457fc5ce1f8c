"""Memory for building a network, whose sizes are numbers in a recipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpml.core import memory
from hpml.core.errors import ConfigInvalid

_WORTH_A_LOOK = 2**24  # bytes of a tensor


class memory_limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, refuses a tensor that does not fit into the memory left, before it is made.

    It sees every operator that makes a tensor of a given size: empty, zeros, randn and their kind. Raises
    ConfigInvalid that says how much `what`, such as "the model cnn", asked for.
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        arguments = func._schema.arguments
        on_meta = str(given.get("device")) == "meta"
        if arguments and arguments[0].name == "size":
            dtype = given.get("dtype") or torch.get_default_dtype()
            wanted = math.prod(args[0] if args else given["size"]) * dtype.itemsize
            if wanted > _WORTH_A_LOOK and wanted > (sys.maxsize if on_meta else memory.available_bytes()):
                raise _does_not_fit(self._what, f"it asks for a tensor of {memory.in_words(wanted)}")
        return func(*args, **given)


def require_fits(what: str, build: Callable[[], nn.Module]) -> None:
    """Build a network without its weights, and raise ConfigInvalid if these would not fit into this machine.

    For networks of ours: what other code does then, such as keeping tensors for later, is not known.
    """
    try:
        with torch.device("meta"):
            skeleton = build()
    except (TypeError, RuntimeError) as error:  # of torch, with frames of C++
        if "Overflow when unpacking" in str(error):
            raise _does_not_fit(what, "one of its sizes has more than 64 bits") from None
        raise
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if weights_bytes > memory.total_bytes():
        numbers = sum(tensor.numel() for tensor in tensors)
        raise _does_not_fit(what, f"its {numbers:,} weights take {memory.in_words(weights_bytes)}")


def _does_not_fit(what: str, why: str) -> ConfigInvalid:
    here = f"{memory.in_words(memory.available_bytes())} of {memory.in_words(memory.total_bytes())}"
    return ConfigInvalid(
        f"{what} does not fit into memory",
        why=f"{why}, this machine has {here} left",
        fix="lower its sizes, such as train.model.arguments.width (--arg width in hpml bench)",
    )
