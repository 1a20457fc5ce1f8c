"""What can be asked of a network or an engine: named operations on named tensors."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Config

DataType = Literal["float32", "float16", "int64", "int32", "bool"]

# In the words of the Open Inference Protocol.
DATATYPES = {"float32": "FP32", "float16": "FP16", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}

_PLUS = " + "


def free_names(size: int | str) -> tuple[str, ...]:
    """The free dimensions that a size consists of: none of a number, two of "past + sequence"."""
    return tuple(size.split(_PLUS)) if isinstance(size, str) else ()


class TensorSpec(Config):
    """One input or output.

    A size of `shape` is a number, the name of a dimension that is free, or a sum of such names. The first
    dimension is the batch, by that name. content: what the numbers are, with their unit.
    below: of ids, which are 0 to below - 1; None: they are none.
    """

    name: str
    dtype: DataType = "float32"
    shape: tuple[int | str, ...]
    content: str = ""
    below: int | None = None

    def sizes(self, **free: int) -> tuple[int, ...]:
        """The shape where the free dimensions have these sizes."""
        return tuple(
            sum(free[name] for name in free_names(size)) if isinstance(size, str) else size
            for size in self.shape
        )


class Operation(Config):
    """A graph of a network with what it takes and gives, in the order of the network's own arguments.

    Two operations may run the same graph on inputs of other sizes, as `prefill` and `decode` do.
    """

    name: str = "predict"
    graph: str = "model"  # the graph `model` is in the engine's main file
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
