"""The score on the test split, in words."""

from __future__ import annotations

from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.metric import MetricFacts


def test_score_in_words(evaluation: EvaluationSpec) -> str:
    """The chosen engine's metrics and the reference's, on rows that no choice was made by."""
    told = [
        f"{metric.label} {_with_interval(evaluation.quality[metric.name], metric)}, the reference"
        f" {_with_interval(evaluation.reference_quality[metric.name], metric)}"
        for metric in evaluation.metrics
    ]
    return f"On {evaluation.rows:,} test rows, which no choice was made by: {'; '.join(told)}."


def _with_interval(figure: Interval, metric: MetricFacts) -> str:
    return (
        f"{metric.in_words(figure.value)} ({metric.in_words(figure.low)} to {metric.in_words(figure.high)})"
    )
