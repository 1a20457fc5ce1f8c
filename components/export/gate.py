"""Whether an engine may stand for its network: the same answers, worth as much."""

from __future__ import annotations

from hpml.targets import Tolerance
from hpml.tasks import Task
from hpml.tasks.judging import Judgement


def objections(task: Task, engine: Judgement, network: Judgement, tolerance: Tolerance) -> str:
    """What was measured beyond what `tolerance` allows, in words; empty if nothing."""
    found = []
    error, allowed_error = engine.max_abs_error, tolerance.max_abs_error
    if allowed_error is not None and error > allowed_error:
        found.append(f"an output is off by {error:.3g}, allowed {allowed_error:.3g}")
    error, allowed_error = engine.relative_error, tolerance.max_relative_error
    if allowed_error is not None and error > allowed_error:
        found.append(f"the output is off by {error:.2%} of its size, allowed {allowed_error:.2%}")
    same, required = engine.agreement, tolerance.min_agreement
    if same is not None and required is not None and same < required:
        found.append(f"{same:.2%} of what it decides is what the network decides, required {required:.2%}")
    same, required = engine.generation_agreement, tolerance.min_generation_agreement
    if same is not None and required is not None and same < required:
        found.append(
            f"{same:.2%} of what it generates is what the network generates, required {required:.2%}"
        )
    metric, allowed_loss = task.metric, tolerance.max_quality_loss
    value = engine.quality[metric.name]
    loss = metric.loss(value, network.quality[metric.name])
    if allowed_loss is not None and not loss <= allowed_loss:
        found.append(
            f"{metric.label} is worse by {metric.loss_in_words(loss)}, {metric.in_words(value)},"
            f" allowed {metric.loss_in_words(allowed_loss)}"
        )
    return "; ".join(found)
