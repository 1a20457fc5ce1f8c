"""Tensors of requests, over HTTP or gRPC, held against what an operation takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpml.artifacts.operation import DATATYPES, Operation, TensorSpec, free_names
from hpml.serving.errors import RequestRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS = {"FP32": "fiu", "FP16": "fiu", "INT64": "iu", "INT32": "iu", "BOOL": "b"}  # of numpy, for numbers


class Given(Protocol):
    """What a request says of an input."""

    @property
    def name(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


def matched(inputs: Sequence[Given], operation: Operation) -> list[TensorSpec]:
    """What the operation takes, in the order of `inputs`.

    Raises RequestRefused (400) if they are not those inputs, each once, of their datatypes and shapes.
    """
    known = {one.name: one for one in operation.inputs}
    given = [one.name for one in inputs]
    if sorted(given) != sorted(known):
        raise RequestRefused(
            400, f"the inputs are {listed(given)}; the model takes {listed(known)}, each once"
        )
    for one in inputs:
        told = known[one.name]
        if one.datatype != DATATYPES[told.dtype]:
            raise RequestRefused(
                400,
                f"the input {one.name} has the datatype {one.datatype[:20]}, not {DATATYPES[told.dtype]}",
            )
        if not _fits(one.shape, told):
            raise RequestRefused(
                400, f"the input {one.name} has the shape {[*one.shape]}, the model takes {shape(told)}"
            )
    return [known[name] for name in given]


def _fits(given: Sequence[int], told: TensorSpec) -> bool:
    return len(given) == len(told.shape) and all(
        size >= 0 and (isinstance(own, str) or size == own)
        for size, own in zip(given, told.shape, strict=True)
    )


def from_numbers(one: Given, told: TensorSpec, numbers: Iterable[Any]) -> NDArray[Any]:
    """An input of numbers as JSON or protobuf have them, flat or nested.

    Raises RequestRefused (400) if they are not of its datatype, or not as many as its shape says.
    """
    try:
        array = np.asarray(numbers)
    except (ValueError, OverflowError):
        raise RequestRefused(400, f"the data of the input {one.name} are ragged") from None
    if array.size != math.prod(one.shape):
        raise RequestRefused(
            400, f"the input {one.name} has {array.size} numbers, its shape is {[*one.shape]}"
        )
    kinds = array.dtype.kind in _KINDS[one.datatype]
    fits = told.dtype != "int32" or not array.size or not kinds or np.abs(array).max() < 2**31
    if array.size and not (kinds and fits):
        raise RequestRefused(
            400, f"the data of the input {one.name} are not all of the datatype {one.datatype}"
        )
    with np.errstate(over="ignore"):
        found = array.astype(told.dtype).reshape(one.shape)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise RequestRefused(400, f"a number of the input {one.name} is too large for {one.datatype}")
    return found


def from_bytes(one: Given, told: TensorSpec, content: bytes | memoryview) -> NDArray[Any]:
    """An input of bytes: little-endian, row by row.

    Raises RequestRefused (400) if they are not as many as its shape and datatype say, or not finite.
    """
    dtype = np.dtype(told.dtype).newbyteorder("<")
    needed = math.prod(one.shape) * dtype.itemsize
    if len(content) != needed:
        raise RequestRefused(
            400, f"the input {one.name} of {[*one.shape]} takes {needed} bytes, not {len(content)}"
        )
    array = np.frombuffer(content, dtype).reshape(one.shape)
    array = array if array.flags.aligned else array.copy()
    if dtype.kind == "b":
        array = array.view(np.uint8) != 0
    if dtype.kind == "f" and not np.isfinite(array).all():  # an engine in int8 answers NaN with numbers
        raise RequestRefused(400, f"the input {one.name} holds numbers that are not finite, such as NaN")
    return array


def check_sizes(
    feeds: Mapping[str, NDArray[Any]], operation: Operation, max_rows: int, largest: Mapping[str, int]
) -> None:
    """Raise RequestRefused (400) if dimensions of one name differ, or there is no row, or too many.

    largest: how large a free dimension may be, by its name, where that is known.
    """
    sizes: dict[str, int] = {}
    sums: list[tuple[str, tuple[str, ...], int]] = []
    for one in operation.inputs:
        for own, size in zip(one.shape, feeds[one.name].shape, strict=True):
            names = free_names(own)
            if len(names) > 1:
                sums.append((one.name, names, size))
            elif names and sizes.setdefault(names[0], size) != size:
                raise RequestRefused(
                    400, f"the inputs do not agree: {own} is {sizes[names[0]]}, and {size} in {one.name}"
                )
    for name, most in largest.items():
        if sizes.get(name, 0) > most:
            raise RequestRefused(400, f"{name} is {sizes[name]}, at most {most} is allowed")
    for name, names, size in sums:
        if sum(sizes.get(part, 0) for part in names) != size:
            raise RequestRefused(
                400, f"the inputs do not agree: {' + '.join(names)} is not {size}, as in {name}"
            )
    rows = len(next(iter(feeds.values())))
    if not 1 <= rows <= max_rows:
        raise RequestRefused(400, f"the request has {rows} rows, 1 to {max_rows} are allowed")


def check_ids(feeds: Mapping[str, NDArray[Any]], operation: Operation) -> None:
    """Raise RequestRefused (400) for ids that there are not: ONNX counts negative ones from the end."""
    for one in operation.inputs:
        array = feeds[one.name]
        if one.below is not None and array.size and not (array.min() >= 0 and array.max() < one.below):
            raise RequestRefused(
                400,
                f"the input {one.name} holds {array.min()} to {array.max()}, not 0 to {one.below - 1}",
            )


def shape(tensor: TensorSpec) -> list[int]:
    """With -1 for what is free."""
    return [size if isinstance(size, int) else -1 for size in tensor.shape]


def listed(names: Collection[str]) -> str:
    """The first of them, each of moderate length."""
    return ", ".join(str(name)[:40] for name in list(names)[:8]) or "none"
