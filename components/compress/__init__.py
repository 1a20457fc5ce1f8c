"""The compression methods. A method is one file here and one row of METHODS. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator

from hpml.components.compress.base import DoesNotApply, Method, Network
from hpml.components.compress.distill import Distill
from hpml.components.compress.prune import Prune
from hpml.components.compress.quantize import Quantize
from hpml.core.contract import BareName

METHODS: dict[str, type[Method]] = {
    "prune": Prune,
    "distill": Distill,
    "quantize": Quantize,
}

if TYPE_CHECKING:
    AnyMethod = Method
else:
    AnyMethod = Annotated[
        Union[tuple(METHODS.values())],  # noqa: UP007
        Discriminator("method"),
        BareName("method"),
    ]

__all__ = ["METHODS", "AnyMethod", "DoesNotApply", "Method", "Network"]
