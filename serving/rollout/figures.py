"""What the servers of a rollout and who rolls out tell each other. Does not import numpy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.artifacts.interval import Interval
from hpml.core.contract import Config

RELEASE_HEADER = "hpml-release"  # of every answer: which of several servers behind one address it is of
MOST_REPLAY_S = 300.0  # for recorded requests to be sent


class Latencies(Config):
    """Of one server, as its client saw them, in milliseconds."""

    requests: int
    latency_ms_p50: float
    latency_ms_p99: float


class ReplayFigures(Config):
    """What became of recorded requests, sent to the canary and to the stable server in turns.

    recorded: requests in the file. sent: of these, before the time was over or too many failed. failures: of
    the canary where the stable server answered, or there is none, in words. unanswered_by_stable: requests.
    agreement: the share of the answers, in which both are at one; None where there is nothing to compare.
    compared: how many: decisions of the task, or rows where it decides nothing, whose numbers have to be
    within the tolerance of the canary's engine.
    """

    recorded: int
    sent: int
    failures: tuple[str, ...] = ()
    unanswered_by_stable: int = 0
    agreement: float | None = None
    compared: int = 0
    compared_by: Literal["decisions", "rows"] = "decisions"
    canary: Latencies | None = None
    stable: Latencies | None = None


class SmokeFigures(Config):
    """What was seen of the canary, and of the stable server in the same window.

    disagreements, failures: in words. p50_ratio: the canary's over the stable server's, paired by round; None
    without a stable server. engine_ms_mean: of a run of the canary's engine while it was asked, by its own
    metrics; hardware: the CPU that it ran on. tolerances: by model and output, what a number of the canary
    may be off by. replay: None where no requests were given.
    """

    release: str
    answers_through: int = 0  # of the canary, by the address that clients use
    disagreements: tuple[str, ...] = ()
    tolerances: dict[str, dict[str, float]] = Field(default_factory=dict)
    failures: tuple[str, ...] = ()
    canary: Latencies | None = None
    stable: Latencies | None = None
    p50_ratio: Interval | None = None
    engine_ms_mean: float | None = None
    hardware: str = ""
    replay: ReplayFigures | None = None
