"""Golden samples: a few requests of each operation and an engine's own answers, kept with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.operation import Operation
from hpml.tasks.base import Runs, Task

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays

ROWS = 16


def golden_file(operations: Sequence[Operation], operation: Operation, name: str) -> str:
    """Where a golden input or output lies: of the first operation without that one's name."""
    is_first = operation.name == operations[0].name
    return f"golden_{name}.npy" if is_first else f"golden_{operation.name}_{name}.npy"


def golden_inputs(
    task: Task, runs: Runs, operations: Sequence[Operation], stored: Arrays
) -> dict[str, Arrays]:
    """Requests of each operation for rows spread over a split: a folder of images is sorted by class."""
    from hpml.tasks.judging import rows_of  # torch: the process of a measured engine has none

    rows = len(next(iter(stored.values())))
    spread = rows_of(stored, np.linspace(0, rows - 1, ROWS).astype(int))
    return {one.name: task.requests(runs, spread, one) for one in operations}


def save_inputs(folder: Path, operations: Sequence[Operation], inputs: Mapping[str, Arrays]) -> None:
    """Write the golden inputs of each operation into `folder`."""
    for one in operations:
        for name, array in inputs[one.name].items():
            np.save(folder / golden_file(operations, one, name), array)


def save_outputs(
    folder: Path, operations: Sequence[Operation], inputs: Mapping[str, Arrays], engine: Runs
) -> None:
    """Write what `engine` answers to the golden inputs into `folder`."""
    for one in operations:
        for name, array in engine.run(inputs[one.name], one.name).items():
            np.save(folder / golden_file(operations, one, name), array)


def load(folder: Path, operations: Sequence[Operation], operation: Operation, names: Sequence[str]) -> Arrays:
    """The golden arrays of an operation that `folder` has, by the names of its inputs or outputs."""
    return {
        name: np.load(folder / golden_file(operations, operation, name), allow_pickle=False) for name in names
    }


def relative_error(answer: NDArray[Any], expected: NDArray[Any]) -> float:
    """How far an output is from a golden one of its shape, as a share of that's largest; NaN counts as 1."""
    error = np.abs(answer - expected).max() / max(float(np.abs(expected).max()), 1e-30)
    return float(np.nan_to_num(error, nan=1.0))
