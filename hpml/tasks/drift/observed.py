"""What is counted of requests and answers to notice drift, where a task does not say so itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"
Observed: TypeAlias = "dict[str, NDArray[Any]]"  # any number of values a row; whole numbers are categories
_MOST_COLUMNS = 64


def of_arrays(inputs: Arrays, outputs: Arrays) -> Observed:
    """Of each input, and of the first output: the columns of a table; of else the mean and the deviation.

    Whole numbers of more axes, such as ids, are counted one by one.
    """
    first = next(iter(outputs))
    found: Observed = {}
    for name, array in {**inputs, first: outputs[first]}.items():
        found |= _of_array(name, array)
    return found


def _of_array(name: str, array: NDArray[Any]) -> Observed:
    if array.ndim == 1:
        return {name: array}
    if array.ndim == 2 and array.shape[1] == 1:
        return {name: array[:, 0]}
    if array.ndim == 2 and array.shape[1] <= _MOST_COLUMNS:
        return {f"{name}[{column}]": array[:, column] for column in range(array.shape[1])}
    if array.dtype.kind != "f":
        return {name: array.ravel()}
    rows = array.reshape(len(array), -1)
    return {f"mean of {name}": rows.mean(axis=1), f"deviation of {name}": rows.std(axis=1)}


def of_logits(logits: NDArray[Any], what: str) -> Observed:
    """Of logits (rows, n): which is the largest, and its probability."""
    largest = logits.max(axis=1)
    share = 1 / np.exp(logits.astype(np.float32) - largest[:, None]).sum(axis=1)
    return {what: logits.argmax(axis=1), f"probability of the {what}": share}
