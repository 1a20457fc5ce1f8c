"""The goals of a recipe, and which engine meets them. Pure: select decides with it, report explains with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from components.artifacts import EngineFigures, Interval, MeasurementsSpec
from components.contract import Config

Objective = Literal["latency_ms_p50", "latency_ms_p99", "throughput", "size_bytes"]


class Goals(Config):
    """What the chosen engine has to satisfy, and what is then minimised (throughput: maximised)."""

    max_accuracy_drop: float = Field(
        default=0.01, ge=0, le=1
    )  # of top-1, from the reference's; 0.01 = 1 point
    max_latency_ms_p99: float | None = Field(default=None, gt=0)
    max_size_mb: float | None = Field(default=None, gt=0)  # 1 MB = 1e6 bytes
    objective: Objective = "latency_ms_p50"


@dataclass(frozen=True)
class Verdict:
    """Where one engine stands: `outcome`, and `reason` in words.

    shortfall: for a disqualified engine, how far it misses its worst constraint, relative (0.5 = by half).
    """

    outcome: Literal["chosen", "tied", "qualified", "disqualified", "not built", "reference"]
    reason: str
    shortfall: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The verdict on every engine, the chosen one (None if none qualifies), and the nearest to qualifying."""

    verdicts: dict[str, Verdict]
    chosen: str | None
    nearest: str | None
    reason: str


def decide(goals: Goals, measurements: MeasurementsSpec) -> Decision:
    """Judge every engine against `goals`.

    The best objective wins; engines whose objective's interval overlaps the best one's are tied with it, and
    the tie goes to the smallest. The reference (torch eager) is measured but cannot be chosen.
    """
    raise NotImplementedError
