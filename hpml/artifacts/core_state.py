"""How far the CPUs of a machine are from each other, and the states of that."""

from __future__ import annotations

from hpml.artifacts.interval import Interval
from hpml.core.contract import Config


class CoreState(Config):
    """One of the distances between the CPUs that were seen while the engines were timed.

    Virtual CPUs are moved between the core complexes of their host. What two threads of an engine then take
    to hand each other a cache line differs several times, and so does the engine's latency.
    round_trip_ns: of a cache line between two CPUs, as the probe sees it; its loops in Python included.
    """

    name: str  # "near", "far", with more than two also "middle", "middle 2"
    round_trip_ns: Interval  # the median of the probes, and the middle 95 % of them
    share: float  # of the time of the rounds, kept or not
    seconds: float


class CoreDistances(Config):
    """How far the CPUs of a machine are from each other: a cache line's way from one to another and back.

    round_trips_ns: row i has those of the i-th CPU with each one before it, at first. states: nearest first.
    """

    cpus: tuple[int, ...]  # a sample, where there are many
    usable_cpus: int  # that it is of
    round_trips_ns: tuple[tuple[float, ...], ...] = ()
    states: tuple[CoreState, ...] = ()  # empty with one CPU
    changes: int = 0  # from one state to another
    seconds: float = 0.0  # that they were watched for
