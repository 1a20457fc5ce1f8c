"""Whether an int8 model may stand for the fp32 one: the same classes, the same accuracy, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.quality import mcnemar_exact, paired_change
from hpml.measuring.statistics import wilson
from hpml.pipelines.quantize.job import Bounds, Judgement
from hpml.pipelines.quantize.samples import Feeds, Rows, Samples
from hpml.targets.onnx_session import OnnxSession

_BATCH = 32


@dataclass
class _Seen:
    """What both models answered, of one output. classes: (rows, classes) of each, if it is that."""

    classes: tuple[list[NDArray[Any]], list[NDArray[Any]]] = field(default_factory=lambda: ([], []))
    signal: float = 0.0  # sum of squares
    noise: float = 0.0
    largest: float = 0.0
    numbers: int = 0
    nan: int = 0
    infinite: int = 0

    def add(self, expected: NDArray[Any], own: NDArray[Any], *, is_classes: bool) -> None:
        """The answers to one more batch."""
        a, b = expected.astype(np.float64), own.astype(np.float64)
        finite = np.isfinite(b)
        difference = (a - b)[finite]
        self.signal += float((a**2).sum())
        self.noise += float((difference**2).sum())
        self.largest = max(self.largest, float(np.abs(difference).max(initial=0.0)))
        self.numbers += b.size
        self.nan += int(np.isnan(b).sum())
        self.infinite += int(np.isinf(b).sum())
        if is_classes:
            self.classes[0].append(expected)
            self.classes[1].append(own)


def judge(
    fp32: OnnxSession, int8: OnnxSession, samples: Samples, rows: Rows, batch: int | None, bounds: Bounds
) -> Judgement:
    """Compare both models on the samples `rows`. batch: the only one that they take.

    Raises StageFailed if the fp32 model itself answers NaN or infinity, or nothing that can be compared.
    """
    seen: dict[str, _Seen] = {}
    classes = ""
    for part in batches(rows, batch):
        feeds = samples.feeds(part)
        expecteds = answers_of_fp32(fp32, feeds)
        for name, expected, own in zip(fp32.outputs, expecteds, int8.run(feeds), strict=True):
            if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fiub":
                continue
            _check_finite(name, expected)
            is_classes = _is_classes(expected, len(part))
            classes = classes or (name if is_classes else "")
            seen.setdefault(name, _Seen()).add(expected, own, is_classes=is_classes)
    if not seen:
        raise StageFailed("the model answers no arrays of numbers", why=f"it gives {', '.join(fp32.outputs)}")
    name = classes or max(seen, key=lambda one: np.sqrt(seen[one].noise / (seen[one].signal or 1.0)))
    judgement = _judged(name, seen[name], bool(classes), samples, rows)
    return judgement.model_copy(update={"refusal": objections(judgement, bounds)})


def batches(rows: Rows, batch: int | None) -> Iterator[Rows]:
    """`rows` in parts. batch: how many each has, the last one filled with rows of its own; None: up to 32."""
    for part in np.split(rows, range(batch or _BATCH, len(rows), batch or _BATCH)):
        yield np.resize(part, batch) if batch and len(part) < batch else part


def answers_of_fp32(fp32: OnnxSession, feeds: Feeds) -> list[Any]:
    """What the fp32 model answers; raises StageFailed if it cannot run on these samples."""
    try:
        return fp32.run(feeds)
    except Exception as error:  # ONNX Runtime's derive from nothing narrower
        raise StageFailed(
            "the fp32 model itself cannot run on the samples in --data",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="check their values, such as indices beyond the end of a table, and the sizes",
        ) from None


def _is_classes(output: NDArray[Any], rows: int) -> bool:
    return output.dtype.kind == "f" and output.ndim == 2 and len(output) == rows and output.shape[1] > 1


def _check_finite(name: str, expected: NDArray[Any]) -> None:
    if expected.dtype.kind == "f" and not np.isfinite(expected).all():
        raise StageFailed(
            f"the fp32 model itself answers NaN or infinity in {name!r}",
            why="what it answers is what int8 is judged by",
            fix="check the preprocessing (--mean, --std, --scale), or the model",
        )


def _judged(name: str, seen: _Seen, is_classes: bool, samples: Samples, rows: Rows) -> Judgement:
    relative = float(np.sqrt(seen.noise / seen.signal)) if seen.signal else float(seen.noise > 0)
    common = Judgement(
        output=name,
        is_classes=is_classes,
        samples=len(rows),
        max_abs_error=seen.largest,
        relative_error=relative,
        numbers=seen.numbers,
        nan=seen.nan,
        infinite=seen.infinite,
    )
    if not is_classes:
        return common
    expected, own = (np.concatenate(parts)[: len(rows)] for parts in seen.classes)
    # An answer with NaN is of no class.
    hopeless = np.isnan(own).any(axis=1)
    same = float(((own.argmax(axis=1) == expected.argmax(axis=1)) & ~hopeless).mean())
    told: dict[str, Any] = {"top1_agreement": wilson(same, len(rows))}
    if samples.labels is not None:
        labels = samples.labels[rows]
        if labels.max() >= expected.shape[1]:
            raise ConfigInvalid(
                f"the labels go up to {labels.max()}",
                why=f"the output {name!r} has {expected.shape[1]} classes, numbered from 0",
            )
        own = np.where(
            hopeless[:, None], np.where(np.arange(own.shape[1]) == labels[:, None], -1.0, 0.0), own
        )
        right, right_before = (logits.argmax(axis=1) == labels for logits in (own, expected))
        gained, lost = int((right & ~right_before).sum()), int((right_before & ~right).sum())
        told |= {
            "accuracy_fp32": wilson(float(right_before.mean()), len(rows)),
            "accuracy_int8": wilson(float(right.mean()), len(rows)),
            "accuracy_change": paired_change(gained, lost, len(rows)),
            "mcnemar_p": mcnemar_exact(gained, lost),
        }
    return common.model_copy(update=told)


def objections(judgement: Judgement, bounds: Bounds) -> str:
    """What is beyond what `bounds` allow, in words; empty if nothing."""
    found = []
    if judgement.nan or judgement.infinite:
        counts = {"NaN": judgement.nan, "infinity": judgement.infinite}
        told = " and ".join(f"{kind} {count:,} times" for kind, count in counts.items() if count)
        found.append(f"it answers {told} in {judgement.numbers:,} numbers")
    same = judgement.top1_agreement
    if same is not None and same.value < bounds.min_top1_agreement:
        found.append(
            f"{same.value:.2%} of the samples get the fp32 model's class, "
            f"required {bounds.min_top1_agreement:.2%}"
        )
    change, int8 = judgement.accuracy_change, judgement.accuracy_int8
    if change is not None and int8 is not None and round(-change.value, 9) > bounds.max_accuracy_drop:
        found.append(
            f"accuracy drops by {-100 * change.value:.2f} points to {int8.value:.2%}, "
            f"allowed {100 * bounds.max_accuracy_drop:.2f}"
        )
    if not judgement.is_classes and judgement.relative_error > bounds.max_relative_error:
        found.append(
            f"the relative error of {judgement.output!r} is {judgement.relative_error:.3g}, "
            f"allowed {bounds.max_relative_error:g}"
        )
    return "; ".join(found)
