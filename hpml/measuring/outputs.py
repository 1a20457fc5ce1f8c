"""Whether engines that are measured together also answer alike: the same requests to all, one at a time."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.measurements import OutputComparison, OutputFigures
from hpml.core.contract import Output
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.process.engine_process import GRACE_S, EngineProcess
from hpml.measuring.subjects import Subject

_REQUESTS = 64
_SECONDS = 5.0  # no request after so many
_LARGEST = 256 * 1024**2  # bytes of all answers of an engine; no request after so many

Arrays = Mapping[str, NDArray[Any]]
Answers = list[dict[str, Any]]  # of each request, by the output's name; None: no array of numbers


def compare_outputs(
    config: BenchmarkConfig,
    subjects: Mapping[str, Subject],
    takes: Mapping[str, Sequence[str]],
    inputs: Path,
    out: Output,
) -> dict[str, OutputComparison]:
    """What each of `subjects` answers to the first rows of `inputs`, beside what the reference does.

    Nothing where there is only one. takes: which arrays of `inputs` a subject takes. Raises StageFailed that
    names the subject that crashes, answers wrongly, or takes longer than the time budget allows.
    """
    if len(subjects) == 1:
        return {}
    files, reference, limit_s = {}, config.reference, config.time_budget_s + GRACE_S
    for index, (name, subject) in enumerate(subjects.items()):
        file = out.scratch / f"outputs-{index}.npz"
        with EngineProcess(name, file.with_suffix(".log"), reply_limit_s=limit_s) as process:
            process.ask(
                "load",
                "loading",
                subject=subject.model_dump(mode="json"),
                inputs=str(inputs),
                batch_sizes=[1],
                threads=config.threads or out.threads,
            )
            told = process.ask(
                "outputs", "telling its outputs", requests=_REQUESTS, seconds=_SECONDS, file=str(file)
            )
        files[name] = (file, told["names"])
    expected = _read(*files[reference])
    return {
        name: compare(_read(*files[name]), expected, is_reference=name == reference)
        if list(takes[name]) == list(takes[reference])
        else OutputComparison(reason=f"it takes other inputs than {reference}")
        for name in subjects
    }


# ---------------------------------------------------------------------------------------- what each answers


def write(
    outputs: Callable[[Arrays], dict[str, Any]] | None,
    arrays: Arrays,
    file: Path,
    *,
    requests: int,
    seconds: float,
) -> dict[str, Any]:
    """Write what `outputs` gives for the first rows of `arrays` to `file`, and tell the names."""
    until_s = time.perf_counter() + seconds
    names: list[str] = []
    written = 0
    with zipfile.ZipFile(file, "w") as archive:
        for row in range(min(requests, *(len(array) for array in arrays.values())) if outputs else 0):
            assert outputs is not None
            answer = outputs({name: array[row : row + 1] for name, array in arrays.items()})
            names = names or list(answer)
            for name, value in answer.items():
                if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
                    written += value.nbytes
                    with archive.open(f"{row}:{names.index(name)}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, value, allow_pickle=False)
            if time.perf_counter() > until_s or written > _LARGEST:
                break
    return {"names": names}


def _read(file: Path, names: Sequence[str]) -> Answers:
    with np.load(file, allow_pickle=False) as arrays:
        rows = 1 + max((int(key.partition(":")[0]) for key in arrays.files), default=-1)
        return [
            {name: arrays.get(f"{row}:{index}") for index, name in enumerate(names)} for row in range(rows)
        ]


# -------------------------------------------------------------------------------------------- beside another


def compare(answers: Answers, expected: Answers, *, is_reference: bool = False) -> OutputComparison:
    """The outputs of `answers` beside those of `expected`, by name, or by place where names differ."""
    requests = min(len(answers), len(expected))
    if not requests:
        return OutputComparison(reason="it answers no arrays of numbers")
    names, others = list(answers[0]), list(expected[0])
    counterparts = _counterparts(names, others)
    figures = []
    for name in names:
        own = [answer.get(name) for answer in answers[:requests]]
        if name in counterparts:
            beside = [answer.get(counterparts[name]) for answer in expected[:requests]]
            figures.append(_beside(name, counterparts[name], own, beside, is_reference=is_reference))
        else:
            figures.append(_alone(name, own, f"the reference has no such output, it has {', '.join(others)}"))
    lacking = [
        OutputFigures(name=other, reason="only the reference has it")
        for other in others
        if other not in counterparts.values()
    ]
    return OutputComparison(requests=requests, outputs=(*figures, *lacking))


def _counterparts(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """The reference's output for each of `names`: of the same name, or of the same place among the rest."""
    own = [name for name in names if name not in others]
    rest = [name for name in others if name not in names]
    by_place = dict(zip(own, rest, strict=True)) if len(own) == len(rest) else {}
    return {name: name for name in names if name in others} | by_place


def _alone(name: str, own: list[Any], reason: str, other: str = "") -> OutputFigures:
    """An output of which only its own numbers can be told."""
    arrays = [array for array in own if array is not None]
    return OutputFigures(
        name=name,
        reference_name="" if other == name else other,
        reason=reason,
        numbers=sum(array.size for array in arrays),
        nan=sum(int(np.isnan(array).sum()) for array in arrays if array.dtype.kind == "f"),
        infinite=sum(int(np.isinf(array).sum()) for array in arrays if array.dtype.kind == "f"),
    )


def _beside(
    name: str, other: str, own: list[Any], expected: list[Any], *, is_reference: bool
) -> OutputFigures:
    if any(array is None for array in (*own, *expected)):
        return _alone(name, own, "it is no array of numbers", other)
    shapes = next(
        ((a.shape, b.shape) for a, b in zip(own, expected, strict=True) if a.shape != b.shape), None
    )
    if shapes:
        return _alone(name, own, f"its shape is {shapes[0]}, the reference's {shapes[1]}", other)
    alone = _alone(name, own, "", other)
    if is_reference:
        return alone
    a, b = (np.concatenate([array.ravel().astype(np.float64) for array in of]) for of in (own, expected))
    both = np.isfinite(a) & np.isfinite(b)
    found: dict[str, float | None] = {"top1_agreement": _top1_agreement(own, expected)}
    if both.any():
        largest = float(np.abs(b[both]).max())
        with np.errstate(over="ignore"):
            difference = float(np.nan_to_num(np.abs(a[both] - b[both])).max())
        found["max_abs_difference"] = difference
        found["max_rel_difference"] = difference / largest if largest else None
    return alone.model_copy(update=found)


def _top1_agreement(own: list[Any], expected: list[Any]) -> float | None:
    """The share of requests with the same class; None unless all are (1, classes) of floats.

    An answer with NaN has no class.
    """
    if any(array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind != "f" for array in own):
        return None
    same: list[bool] = [
        not np.isnan(a).any() and not np.isnan(b).any() and a.argmax() == b.argmax()
        for a, b in zip(own, expected, strict=True)
    ]
    return float(np.mean(same))
