"""What is counted of the validation split and of an engine's answers to it: `drift.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field

from hpml.artifacts.operation import Operation
from hpml.core import regular_files
from hpml.core.contract import Config
from hpml.core.errors import StageFailed
from hpml.tasks.drift.index import MOST_BINS, MOST_CATEGORIES, Bins
from hpml.tasks.drift.observed import Observed, of_arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.tasks.base import Arrays, Runs, Task

DRIFT_FILE = "drift.json"
_LEAST_IN_BIN, _MOST_ROWS = 20, 1000
_MOST_BYTES, _MOST_QUANTITIES = 16 << 20, 256

Observe: TypeAlias = "Callable[[Arrays, Arrays], Observed]"


class DriftReference(Config):
    """What is counted of requests to an operation and of its answers; `drift.json` of engines and bundles."""

    operation: str
    bins: dict[Annotated[str, Field(max_length=80)], Bins] = Field(max_length=_MOST_QUANTITIES)


def observe_of(task: Task) -> Observe:
    """What is counted of a task: of a user's own the default, as its code is not where it is served."""
    return of_arrays if ":" in task.task else task.observed


def save_reference(folder: Path, task: Task, network: Runs, engine: Runs, stored: Arrays) -> None:
    """Write `drift.json` into `folder`: of at most 1,000 rows spread over a split, as `engine` answers them.

    network: what gives the inputs of operations that need more than rows, such as a cache.
    """
    from hpml.tasks.judging import parts_of, rows_of  # torch: a server has none

    operation = next(one for one in engine.operations.values() if task.watched_operation in ("", one.name))
    observe = observe_of(task)
    rows = len(next(iter(stored.values())))
    spread = rows_of(stored, np.unique(np.linspace(0, rows - 1, min(rows, _MOST_ROWS)).astype(int)))
    parts: dict[str, list[NDArray[Any]]] = {}
    for part in parts_of(task, spread):
        inputs = task.requests(network, part, operation)
        for name, values in observe(inputs, engine.run(inputs, operation.name)).items():
            parts.setdefault(name, []).append(values)
    bins = {name: _bins(np.concatenate(values)) for name, values in list(parts.items())[:_MOST_QUANTITIES]}
    known = {name: one for name, one in bins.items() if one is not None}
    found = DriftReference(operation=operation.name, bins=known)
    (folder / DRIFT_FILE).write_text(found.model_dump_json() + "\n")


def _bins(values: NDArray[Any]) -> Bins | None:
    """As many as there are values enough for, up to 10; None of too few values."""
    most = min(MOST_BINS, len(values) // _LEAST_IN_BIN)
    if most < 2:
        return None
    if values.dtype.kind == "f":
        return _bins_of_numbers(values, most)
    return _bins_of_categories(values.astype(np.int64), most)


def _bins_of_numbers(values: NDArray[Any], most: int) -> Bins | None:
    """Of as many values each; and one below, and one above all of them."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        return None
    inner = np.quantile(values, np.linspace(0, 1, most + 1)[1:], method="inverted_cdf")
    edges = np.unique([np.nextafter(values.min(), -np.inf), *inner])
    counts = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
    return Bins(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _bins_of_categories(values: NDArray[np.int64], most: int) -> Bins | None:
    """Few have a bin each, many share one with those as frequent; the last is of what was not there."""
    if values.min() < 0 or values.max() >= MOST_CATEGORIES:
        return None
    if len(np.unique(values)) <= most:
        chosen, counted = values, values
    else:  # some will always be new: how many, only values tell that the bins were not chosen by
        chosen, counted = values[::2], values[1::2]
    frequency = np.bincount(chosen, minlength=values.max() + 1)
    order = np.argsort(-frequency, kind="stable")[: np.count_nonzero(frequency)]
    if len(order) <= most:
        ranked = np.arange(len(order))
    else:
        before = np.cumsum(frequency[order]) - frequency[order]
        ranked = np.unique(before * most // len(chosen), return_inverse=True)[1]
    others = int(ranked[-1]) + 1
    bin_of = np.full(len(frequency), others)
    bin_of[order] = ranked
    counts = np.bincount(bin_of[counted], minlength=others + 1)
    return Bins(bin_of=tuple(bin_of.tolist()), counts=tuple(counts.tolist()))


def read_reference(folder: Path, operations: Sequence[Operation]) -> DriftReference | None:
    """What `folder` of an engine or a bundle has; None of one that was made before there was any.

    Raises StageFailed if it cannot be used.
    """
    file = folder / DRIFT_FILE
    if not file.exists():
        return None
    try:
        if why := regular_files.problem(file):
            raise ValueError(f"it {why}")
        if (size_bytes := file.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {size_bytes:,} bytes, {_MOST_BYTES:,} are allowed")
        found = DriftReference.model_validate_json(file.read_bytes())
        if found.operation not in {one.name for one in operations}:
            raise ValueError(f"there is no operation {found.operation[:40]!r}")
    except (OSError, ValueError) as error:
        raise StageFailed(f"{DRIFT_FILE} cannot be used", why=" ".join(str(error).split())[:300]) from None
    return found
