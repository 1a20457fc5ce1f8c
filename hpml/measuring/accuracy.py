"""The accuracy of each engine against the reference's, on the very same test samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import PairedAccuracy
from hpml.core.errors import StageFailed
from hpml.measuring.statistics import CONFIDENCE, wilson
from hpml.tasks.images import load_split


def paired_accuracies(
    engines: Mapping[str, Artifact[EngineSpec]], data: Artifact[DatasetSpec], *, reference: str
) -> dict[str, PairedAccuracy]:
    """Each built engine but the reference, against it, on the test split of `data`.

    Raises StageFailed that names the engine whose `test_logits.npy` is missing or is not of that split.
    """
    _, labels = load_split(data, "test")
    shape = (len(labels), len(data.spec.class_names))
    of_reference = _test_logits(reference, engines[reference], shape)
    return {
        name: paired_accuracy(_test_logits(name, engine, shape), of_reference, labels)
        for name, engine in engines.items()
        if name != reference and engine.spec.status == "built"
    }


def _test_logits(name: str, engine: Artifact[EngineSpec], shape: tuple[int, int]) -> NDArray[np.float32]:
    file = engine.file("test_logits.npy")
    try:
        logits: NDArray[np.float32] = np.load(file, allow_pickle=False)
    except ValueError as error:
        raise StageFailed(f"{file} of engine {name!r} is not an array", why=str(error)) from None
    if logits.shape != shape or not np.isfinite(logits).all():
        raise StageFailed(
            f"the test logits of engine {name!r} are not those of this test split",
            why=f"they are {logits.shape}, {int((~np.isfinite(logits)).sum())} of them not finite; "
            f"(rows, classes) is {shape}",
            fix="export the engine again from the data of this run",
        )
    return logits


def paired_accuracy(
    logits: NDArray[np.float32], of_reference: NDArray[np.float32], labels: NDArray[np.int64]
) -> PairedAccuracy:
    """An engine against the reference: both logits (rows, classes), labels (rows,)."""
    predicted, expected = logits.argmax(axis=1), of_reference.argmax(axis=1)
    right, reference_right = predicted == labels, expected == labels
    gained = int((right & ~reference_right).sum())
    lost = int((reference_right & ~right).sum())
    return PairedAccuracy(
        top1_change=paired_change(gained, lost, len(labels)),
        mcnemar_p=mcnemar_exact(gained, lost),
        gained=gained,
        lost=lost,
        per_class=tuple(_top1_of_class(right, labels == index) for index in range(logits.shape[1])),
        top1_agreement=float((predicted == expected).mean()),
        max_abs_logit_error=float(np.abs(logits - of_reference).max()),
    )


def _top1_of_class(right: NDArray[np.bool_], of_class: NDArray[np.bool_]) -> Interval:
    """Top-1 on the samples of a class; one without samples can be anything from 0 to 1."""
    rows = int(of_class.sum())
    if not rows:
        return Interval(value=0.0, low=0.0, high=1.0)
    return wilson(float(right[of_class].mean()), rows)


def mcnemar_exact(gained: int, lost: int) -> float:
    """How likely so uneven a split of the disagreements is, or a more uneven one, if each is a fair coin's.

    The exact test of McNemar (1947, Psychometrika 12:153-157), two-sided: twice the binomial tail, at most 1.
    """
    from scipy import special  # what of scipy is quick to import

    return min(1.0, 2 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def paired_change(gained: int, lost: int, rows: int) -> Interval:
    """(gained - lost) / rows, the difference of two proportions of the same samples, with its 95 % interval.

    Tango's score interval (1998, Statist. Med. 17:891-908): the differences that a score test would not
    refuse. It stays within -1 and 1 and has a width where the two never disagree.
    """
    value = (gained - lost) / rows
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return Interval(
        value=value,
        low=_bisect(lambda change: _score(gained, lost, rows, change) <= z, -1.0, value),
        high=_bisect(lambda change: _score(gained, lost, rows, change) < -z, value, 1.0),
    )


def _score(gained: int, lost: int, rows: int, change: float) -> float:
    """Tango's score of the hypothesis that the difference is `change`; it falls as that grows."""
    difference = gained - lost - rows * change
    linear = (2 * rows - gained + lost) * change - gained - lost
    root = math.sqrt(max(0.0, linear**2 + 8 * rows * lost * change * (1 - change)))
    share_lost = (root - linear) / (4 * rows)  # the most likely share of `lost`, given the difference
    variance = rows * (2 * share_lost + change * (1 - change))
    if variance <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / math.sqrt(variance)


def _bisect(passed: Callable[[float], bool], low: float, high: float) -> float:
    """Where `passed` turns true between `low` and `high`, to the precision of a float."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if passed(middle) else (middle, high)
    return high
