"""How good the chosen engine is on the test split, as `evaluate` writes it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import PairedQuality
from hpml.artifacts.metric import MetricFacts
from hpml.core.contract import Config


class EvaluationSpec(Config):
    """The one score of a run on rows that no choice was made by.

    test_split: how often the steps of the run read it: "once", for this, or "never", where no engine was
    chosen; `reason` says why then.
    """

    kind: Literal["evaluation"] = "evaluation"
    test_split: Literal["once", "never"]
    reason: str = ""
    engine: str = ""  # that was chosen, and its digest as it was exported
    engine_digest: str = ""
    reference: str = ""
    rows: int = 0
    metrics: tuple[MetricFacts, ...] = ()  # the first is the one that goals go by
    quality: dict[str, Interval] = Field(default_factory=dict)  # of the engine, by metric
    reference_quality: dict[str, Interval] = Field(default_factory=dict)
    paired: PairedQuality | None = None  # the engine against the reference
