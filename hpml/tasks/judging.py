"""How good the answers of networks and engines are on a split, and how far engines are from their network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from hpml.core.batches import batches
from hpml.core.errors import StageFailed
from hpml.tasks.base import Runs, Task

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays, Outputs

JUDGED = "judged.npz"


@dataclass
class Judgement:
    """What the answers to a split are worth.

    statistics: of each metric, float64 (rows, k). kept: what the task keeps of the outputs, rows in front.
    max_abs_error: of the judged output, against the reference's; the largest float32 where an answer is not a
    number. relative_error: the root of the mean square of these differences, as a share of that of the
    reference's output. agreement: the share of decisions that are the reference's; None where nothing is
    decided.
    generation_agreement: likewise of what is generated step by step, up to where the two part.
    """

    task: Task
    statistics: dict[str, NDArray[np.float64]]
    kept: dict[str, NDArray[Any]]
    max_abs_error: float = 0.0
    relative_error: float = 0.0
    agreement: float | None = None
    generation_agreement: float | None = None

    @property
    def quality(self) -> dict[str, float]:
        """The value of each metric."""
        return {
            one.name: one.value(self.statistics[one.name].sum(axis=0).tolist()) for one in self.task.metrics
        }

    def save(self, folder: Path) -> None:
        """Write `judged.npz` into `folder`."""
        np.savez(folder / JUDGED, allow_pickle=False, **self.statistics, **self.kept)


@dataclass
class _Parts:
    """A judgement that grows batch by batch."""

    statistics: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    kept: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    largest_error: float = 0.0
    noise: float = 0.0  # sums of squares: of the differences, and of the reference's output
    signal: float = 0.0
    same: int = 0
    decided: int = 0

    def add(self, task: Task, outputs: Arrays, stored: Arrays) -> None:
        told = task.statistics(as_network(outputs), _tensors(stored))
        for name, tensor in told.items():
            self.statistics.setdefault(name, []).append(tensor.double().numpy())
        for name, array in task.kept(outputs).items():
            self.kept.setdefault(name, []).append(array)

    def compare(self, task: Task, outputs: Arrays, expected: Arrays, stored: Arrays) -> None:
        judged = next(iter(expected))
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(outputs[judged] - expected[judged]), nan=np.inf)
        error = np.minimum(error, np.finfo(np.float32).max).astype(np.float64)
        self.largest_error = max(self.largest_error, float(error.max(initial=0.0)))
        self.noise += float((error**2).sum())
        self.signal += float((expected[judged].astype(np.float64) ** 2).sum())
        decisions = task.decisions(outputs, stored)
        if decisions is not None:
            self.same += int((decisions == task.decisions(expected, stored)).sum())
            self.decided += decisions.size

    def whole(self, task: Task) -> Judgement:
        return Judgement(
            task,
            {name: np.concatenate(parts) for name, parts in self.statistics.items()},
            {name: np.concatenate(parts) for name, parts in self.kept.items()},
            self.largest_error,
            math.sqrt(self.noise / self.signal) if self.signal else float(self.noise > 0),
            self.same / self.decided if self.decided else None,
        )


def judge(
    task: Task, reference: Runs, engines: Mapping[str, Runs], stored: Arrays
) -> tuple[Judgement, dict[str, Judgement]]:
    """That of the reference, and of each engine beside it, on all rows of `stored`, batch by batch."""
    of_reference, of_engines = _Parts(), {name: _Parts() for name in engines}
    for part in parts_of(task, stored):
        expected = task.outputs(reference, part)
        of_reference.add(task, expected, part)
        for name, engine in engines.items():
            outputs = task.outputs(engine, part)
            of_engines[name].add(task, outputs, part)
            of_engines[name].compare(task, outputs, expected, part)
    judged = {name: parts.whole(task) for name, parts in of_engines.items()}
    some = next(parts_of(task, stored))
    generated = task.generated(reference, some)
    if generated is not None:
        for name, engine in engines.items():
            judged[name].generation_agreement = _same_until_parted(task.generated(engine, some), generated)
    return of_reference.whole(task), judged


def _same_until_parted(generated: NDArray[np.int64] | None, expected: NDArray[np.int64]) -> float:
    """The share of steps before the first that differs, over rows of (rows, steps)."""
    assert generated is not None
    return float(np.logical_and.accumulate(generated == expected, axis=1).mean())


def parts_of(task: Task, stored: Arrays) -> Iterator[Arrays]:
    """The rows of `stored`, as many at once as the task judges at once."""
    rows = len(next(iter(stored.values())))
    for part in batches(rows, task.evaluation_rows):
        yield {name: np.asarray(array[part]) for name, array in stored.items()}


def rows_of(stored: Arrays, rows: Any) -> Arrays:
    """Some rows of a split, in memory."""
    return {name: np.array(array[rows]) for name, array in stored.items()}


def read_judged(file: Path, task: Task, rows: int, *, engine: str) -> Judgement:
    """What `Judgement.save` wrote of `engine`. Raises StageFailed if it is not of a split of so many rows."""
    try:
        with file.open("rb") as opened, NpzFile(opened, allow_pickle=False) as arrays:
            read = dict(arrays)
    except (ValueError, OSError, BadZipFile) as error:
        raise StageFailed(f"{file} of engine {engine!r} does not hold arrays", why=str(error)) from None
    shapes = {name: array.shape for name, array in read.items()}
    wrong = [f"{name} is {shape}" for name, shape in shapes.items() if shape[:1] != (rows,)]
    wrong += [
        f"{one.name} is {shapes.get(one.name, 'missing')}, not {(rows, one.statistics)}"
        for one in task.metrics
        if shapes.get(one.name) != (rows, one.statistics)
    ]
    wrong += [
        f"{infinite} numbers of {name} are not finite"
        for name, array in read.items()
        if (infinite := np.count_nonzero(~np.isfinite(array)))
    ]
    if wrong:
        raise StageFailed(
            f"what engine {engine!r} answered is not about this split",
            why=f"that has {rows} rows; {'; '.join(wrong)}",
            fix="export the engine again from the data of this run",
        )
    statistics = {metric.name: read.pop(metric.name) for metric in task.metrics}
    return Judgement(task, statistics, read)


def as_network(outputs: Arrays) -> Outputs:
    """Outputs by name as a network in torch returns them."""
    tensors = tuple(torch.from_numpy(np.asarray(array)) for array in outputs.values())
    return tensors[0] if len(tensors) == 1 else tensors


def _tensors(stored: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in stored.items()}
