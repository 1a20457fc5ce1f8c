"""The quality of each engine against the reference's, on the very same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import PairedQuality
from hpml.core.errors import StageFailed
from hpml.measuring.statistics import CONFIDENCE, wilson
from hpml.tasks import Metric, task_of
from hpml.tasks.judging import JUDGED, Judgement, read_judged

_RESAMPLES = 2000
_AT_ONCE = 100  # resamples: each takes a number for every row


def judged_engines(
    engines: Mapping[str, Artifact[EngineSpec]], data: Artifact[DatasetSpec]
) -> dict[str, Judgement]:
    """What the answers of each built engine to the validation split of `data` are worth.

    Raises StageFailed that names the engine whose `judged.npz` is missing, as in those of versions before
    there were tasks, or is not of that split.
    """
    task, rows = task_of(data.spec.task), data.spec.split("validation").rows
    built = {name: engine for name, engine in engines.items() if engine.spec.status == "built"}
    old = [name for name, engine in built.items() if JUDGED not in engine.manifest.files]
    if old:
        raise StageFailed(
            f"nothing says how good the answers of {', '.join(map(repr, old))} are",
            why=f"without {JUDGED}: a version before there were tasks exported them",
            fix="export them again from the same model, for example with hpml run",
        )
    return {name: read_judged(engine.file(JUDGED), task, rows, engine=name) for name, engine in built.items()}


def quality(judged: Judgement) -> dict[str, Interval]:
    """Each metric with its interval: Wilson's of a share of the rows, of others the bootstrap over rows."""
    return {metric.name: _interval(metric, judged.statistics[metric.name]) for metric in judged.task.metrics}


def paired_quality(
    engine: Judgement, reference: Judgement, groups: NDArray[np.int64] | None
) -> PairedQuality:
    """An engine against the reference. groups: the place of each row's group, such as its class."""
    task, metric = engine.task, engine.task.metric
    own, others = engine.statistics[metric.name], reference.statistics[metric.name]
    of_decisions: dict[str, Any] = {}
    if _counts_rows(metric, own):
        right, reference_right = own[:, 0] > 0, others[:, 0] > 0
        gained, lost = int((right & ~reference_right).sum()), int((reference_right & ~right).sum())
        of_decisions = {"gained": gained, "lost": lost, "mcnemar_p": mcnemar_exact(gained, lost)}
        if groups is not None:
            of_decisions["groups"] = tuple(
                _share_of_group(right, groups == group) for group in range(len(task.group_names))
            )
    return PairedQuality(
        change={
            one.name: _change(one, engine.statistics[one.name], reference.statistics[one.name])
            for one in task.metrics
        },
        **of_decisions | _agreement(engine, reference),
    )


def _agreement(engine: Judgement, reference: Judgement) -> dict[str, Any]:
    """Of what was kept of the outputs of both."""
    if not engine.kept:
        return {}
    judged = next(iter(engine.kept))
    error = float(np.abs(engine.kept[judged] - reference.kept[judged]).max())
    decisions, others = (one.task.decisions(one.kept, {}) for one in (engine, reference))
    same = {} if decisions is None else {"agreement": float((decisions == others).mean())}
    return {"max_abs_error": error, **same}


def _counts_rows(metric: Metric, statistics: NDArray[np.float64]) -> bool:
    """Whether the metric is the share of the rows for which something holds."""
    return metric.is_share and statistics.shape[1] == 2 and bool((statistics[:, 1] == 1).all())


def _interval(metric: Metric, statistics: NDArray[np.float64]) -> Interval:
    value = metric.value(statistics.sum(axis=0).tolist())
    if _counts_rows(metric, statistics):
        return wilson(value, len(statistics))
    resampled = _resampled(statistics)
    return _percentiles(value, [metric.value(sums) for sums in resampled.tolist()])


def _change(metric: Metric, own: NDArray[np.float64], others: NDArray[np.float64]) -> Interval:
    """How much worse the engine is, as `MetricFacts.loss` has it, turned around: -0.01 is one point lost."""
    if _counts_rows(metric, own):
        right, reference_right = own[:, 0] > 0, others[:, 0] > 0
        gained, lost = int((right & ~reference_right).sum()), int((reference_right & ~right).sum())
        return paired_change(gained, lost, len(own))

    def gain(sums: list[float], of_reference: list[float]) -> float:
        return -metric.loss(metric.value(sums), metric.value(of_reference))

    value = gain(own.sum(axis=0).tolist(), others.sum(axis=0).tolist())
    both = _resampled(np.hstack([own, others]))
    columns = own.shape[1]
    return _percentiles(value, [gain(sums[:columns], sums[columns:]) for sums in both.tolist()])


def _resampled(statistics: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the statistics over as many rows drawn with replacement, (resamples, k), always the same."""
    rows = len(statistics)
    random = np.random.default_rng(0)
    counts = (
        random.multinomial(rows, np.full(rows, 1 / rows), _AT_ONCE) for _ in range(_RESAMPLES // _AT_ONCE)
    )
    return np.concatenate([count @ statistics for count in counts])


def _percentiles(value: float, resampled: list[float]) -> Interval:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def _share_of_group(right: NDArray[np.bool_], of_group: NDArray[np.bool_]) -> Interval:
    """The metric on the rows of a group; one without rows can be anything from 0 to 1."""
    rows = int(of_group.sum())
    if not rows:
        return Interval(value=0.0, low=0.0, high=1.0)
    return wilson(float(right[of_group].mean()), rows)


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
