"""Whether engines that are measured together also answer alike: the same requests to all, one at a time.

Each is one sample; where larger batches are timed, some requests of the largest follow.
"""

from __future__ import annotations

import itertools
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_BATCHED_REQUESTS = 4  # of the largest batch
_SECONDS = 5.0  # no request after so many
_LARGEST = 256 * 1024**2  # bytes of all answers of an engine; no request after so many

Arrays = Mapping[str, NDArray[Any]]
Answers = list[dict[str, Any]]  # of each request, by the output's name; None: no array of numbers
Batched = dict[int, Answers]  # by the batch size of the requests


def compare_outputs(
    config: BenchmarkConfig,
    subjects: Mapping[str, Subject],
    takes: Mapping[str, Sequence[str]],
    inputs: Path,
    out: Output,
) -> dict[str, OutputComparison]:
    """What each of `subjects` answers to the first rows of `inputs`, beside what the reference does.

    Of a single one, only what is not finite. takes: what a subject is given. Raises StageFailed that names
    the subject that crashes, answers wrongly, or takes longer than the time budget allows.
    """
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
            largest = max(config.timed_batches)
            requests = [(1, _REQUESTS), *([(largest, _BATCHED_REQUESTS)] if largest > 1 else [])]
            told = process.ask(
                "outputs",
                "telling its outputs",
                requests=requests,
                seconds=_SECONDS,
                file=str(file),
            )
        files[name] = (file, told["names"])
    expected = _read(*files[reference])
    return {
        name: compare_batches(_read(*files[name]), expected, is_reference=name == reference)
        if sorted(takes[name]) == sorted(takes[reference])
        else OutputComparison(reason=f"it takes other inputs than {reference}")
        for name in subjects
    }


# ---------------------------------------------------------------------------------------- what each answers


def write(
    outputs: Callable[[Arrays], dict[str, Any]] | None,
    arrays: Arrays,
    file: Path,
    *,
    requests: Sequence[tuple[int, int]],
    seconds: float,
) -> dict[str, Any]:
    """Write what `outputs` gives for the first rows of `arrays` to `file`, and tell the names.

    requests: batch sizes, and how many requests of each at most; each size has its share of the `seconds`. Of
    fewer rows than a batch, they repeat.
    """
    names: list[str] = []
    with zipfile.ZipFile(file, "w") as archive:
        for batch, most in requests if outputs else ():
            assert outputs is not None
            until_s, written = time.perf_counter() + seconds / len(requests), 0
            for number, request in enumerate(itertools.islice(_requests(arrays, batch), most)):
                answer = outputs(request)
                names = names or list(answer)
                for name, value in answer.items():
                    if name in names and isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
                        written += value.nbytes
                        member = f"{batch}:{number}:{names.index(name)}.npy"
                        with archive.open(member, "w", force_zip64=True) as content:
                            np.lib.format.write_array(content, value, allow_pickle=False)
                if time.perf_counter() > until_s or written > _LARGEST / len(requests):
                    break
    return {"names": names}


def _requests(arrays: Arrays, batch: int) -> Iterator[Arrays]:
    """Requests of `batch` rows that follow each other; the rows of the last, or only, one begin anew."""
    rows = min(len(array) for array in arrays.values())
    for start in range(0, rows, batch):
        chosen = np.arange(start, start + batch) % rows
        yield {name: array[chosen] for name, array in arrays.items()}


def _read(file: Path, names: Sequence[str]) -> Batched:
    found: Batched = {}
    with np.load(file, allow_pickle=False) as arrays:
        for key in arrays.files:
            batch, number, index = map(int, key.split(":"))
            answers = found.setdefault(batch, [])
            answers += [dict.fromkeys(names) for _ in range(number + 1 - len(answers))]
            answers[number][names[index]] = arrays[key]
    return found


# -------------------------------------------------------------------------------------------- beside another


def compare_batches(answers: Batched, expected: Batched, *, is_reference: bool = False) -> OutputComparison:
    """`compare` for each batch size that both answered."""
    first, *others = sorted({1, *(answers.keys() & expected.keys())})
    found = compare(answers.get(first, []), expected.get(first, []), is_reference=is_reference)
    for batch in others:
        told = compare(answers[batch], expected[batch], is_reference=is_reference)
        figures = (one.model_copy(update={"batch": batch}) for one in told.outputs)
        found = found.model_copy(
            update={"outputs": (*found.outputs, *figures), "batched": {**found.batched, batch: told.requests}}
        )
    return found


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
    alike = both | (np.isnan(a) & np.isnan(b)) | (a == b)  # the same infinity
    found: dict[str, float | None] = {
        "top1_agreement": _top1_agreement(own, expected),
        "not_finite_alone": int((~alike).sum()),
        "is_whole": all(array.dtype.kind != "f" for array in (*own, *expected)),
    }
    if both.any():
        largest = float(np.abs(b[both]).max())
        with np.errstate(over="ignore"):
            difference = float(np.nan_to_num(np.abs(a[both] - b[both])).max())
        found["max_abs_difference"] = difference
        found["max_rel_difference"] = difference / largest if largest else None
    return alone.model_copy(update=found)


def _top1_agreement(own: list[Any], expected: list[Any]) -> float | None:
    """The share of samples with the same class; None unless all are (batch, classes) of floats.

    An answer with NaN has no class.
    """
    if any(array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind != "f" for array in own):
        return None
    a, b = np.concatenate(own), np.concatenate(expected)
    known = ~np.isnan(a).any(axis=1) & ~np.isnan(b).any(axis=1)
    return float(np.mean(known & (a.argmax(axis=1) == b.argmax(axis=1))))
