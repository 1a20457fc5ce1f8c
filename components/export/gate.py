"""Whether an engine may stand for its network: the same answers, and the same share of right ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpml.targets import Tolerance
from hpml.tasks.images import top1_accuracy


@dataclass(frozen=True)
class Agreement:
    """What an engine says of a split, beside what its network in torch says.

    max_abs_error: of any logit, the largest float32 if an engine's logit is not a number.
    top1_agreement: share of rows with the same class. accuracy_drop: negative where the engine is better.
    """

    accuracy_top1: float
    accuracy_drop: float
    max_abs_error: float
    top1_agreement: float


def compare(
    logits: NDArray[np.float32], reference: NDArray[np.float32], labels: NDArray[np.int64]
) -> Agreement:
    """The agreement of an engine's `logits` (rows, classes) with the network's, `reference`."""
    error = np.nan_to_num(np.abs(logits - reference), nan=np.inf)
    accuracy = top1_accuracy(logits, labels)
    return Agreement(
        accuracy_top1=accuracy,
        accuracy_drop=top1_accuracy(reference, labels) - accuracy,
        max_abs_error=float(min(error.max(), np.finfo(np.float32).max)),
        top1_agreement=float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean()),
    )


def objections(agreement: Agreement, tolerance: Tolerance) -> str:
    """What was measured beyond what `tolerance` allows, in words; empty if nothing."""
    found = []
    error, allowed_error = agreement.max_abs_error, tolerance.max_abs_error
    if allowed_error is not None and error > allowed_error:
        found.append(f"a logit is off by {error:.3g}, allowed {allowed_error:.3g}")
    same, required = agreement.top1_agreement, tolerance.min_top1_agreement
    if required is not None and same < required:
        found.append(f"{same:.2%} of the test images get the network's class, required {required:.2%}")
    drop, allowed_drop = agreement.accuracy_drop, tolerance.max_accuracy_drop
    if allowed_drop is not None and drop > allowed_drop:
        found.append(
            f"accuracy drops by {100 * drop:.2f} points to {agreement.accuracy_top1:.2%},"
            f" allowed {100 * allowed_drop:.2f}"
        )
    return "; ".join(found)
