"""What a machine can do at most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from hpml.artifacts.interval import Interval
from hpml.core.contract import Config


class BandwidthPoint(Config):
    """How fast memory is read and written with one working set.

    kernel: "triad" (a = b + s * c; 2 reads and 1 write), "dot" (2 reads), "copy" (1 read, 1 write).
    gb_per_s counts those bytes, 1e9 to the GB; None with a reason where it was not stable or possible.
    """

    device: str  # "cpu", "cuda", "host-to-device", "device-to-host"
    kernel: Literal["triad", "dot", "copy"]
    threads: int
    working_set_bytes: int
    level: str  # "L1", "L2", "L3", "DRAM"; "device" on a GPU; "host" for a copy between the two
    gb_per_s: Interval | None = None
    reason: str = ""
    fastest: float | None = None  # GB/s of its best round, where it is not stable

    @property
    def rate(self) -> Interval | None:
        """`gb_per_s`."""
        return self.gb_per_s

    @property
    def of(self) -> str:
        """`level`."""
        return self.level


class GemmPoint(Config):
    """How fast a square matrix product of `size` runs; 2 * size ** 3 operations."""

    device: str
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    library: str  # the one that a runtime really uses: "torch (oneDNN)", "onnxruntime (MLAS)"
    threads: int
    size: int
    gflop_per_s: Interval | None = None
    reason: str = ""
    fastest: float | None = None  # Gflop/s of its best round, where it is not stable

    @property
    def rate(self) -> Interval | None:
        """`gflop_per_s`."""
        return self.gflop_per_s

    @property
    def of(self) -> str:
        """`precision`."""
        return self.precision


RatedPoint = TypeVar("RatedPoint", BandwidthPoint, GemmPoint)


_BEATEN = 1.1


def peak_of(points: Iterable[RatedPoint]) -> RatedPoint | None:
    """The stable point with the highest rate.

    None if there is none, or if a point that is not stable was a tenth faster in one of its rounds: what has
    been exceeded is no peak.
    """
    known = list(points)
    rates = [point.rate.value if point.rate else 0.0 for point in known]
    best = max(rates, default=0.0)
    beaten = any((point.fastest or 0.0) > _BEATEN * best for point in known)
    return known[rates.index(best)] if best and not beaten else None


class PeaksSpec(Config):
    """What the machine can do at most, per thread count. Points that are not stable are no peaks."""

    kind: Literal["peaks"] = "peaks"
    hardware: dict[str, str]
    bandwidths: tuple[BandwidthPoint, ...]
    gemms: tuple[GemmPoint, ...]

    @property
    def not_stable(self) -> str:
        """The peaks not known as the rounds of their points disagree: "1 thread: L2, int8; cuda: fp16"."""
        every: tuple[BandwidthPoint | GemmPoint, ...] = (*self.bandwidths, *self.gemms)
        points: dict[tuple[str, str], list[Any]] = {}  # the same kind of point under each name
        for point in every:
            points.setdefault((_place(point), point.of), []).append(point)
        unknown: dict[str, list[str]] = {}
        for (place, name), alike in points.items():
            if peak_of(alike) is None and any(point.fastest for point in alike):
                unknown.setdefault(place, []).append(name)
        return "; ".join(f"{place}: {', '.join(names)}" for place, names in unknown.items())

    def arithmetic(self, precision: str, *, threads: int, device: str = "cpu") -> Interval | None:
        """The fastest GEMM (Gflop/s) of `precision` with `threads`, of any library; see `peak_of`."""
        return _peak(self.gemms, precision, threads, device)

    def bandwidth(self, level: str, *, threads: int, device: str = "cpu") -> Interval | None:
        """The highest bandwidth (GB/s) of a level with `threads`, of any kernel; see `peak_of`."""
        return _peak(self.bandwidths, level, threads, device)

    def arithmetic_roof(self, precision: str, *, threads: int, device: str = "cpu") -> Roof | None:
        """`arithmetic`, or what stands in for it."""
        return _roof(self.gemms, precision, threads, device)

    def bandwidth_roof(self, level: str, *, threads: int, device: str = "cpu") -> Roof | None:
        """`bandwidth` of a level of the memory, or what stands in for it."""
        return _roof(self.bandwidths, level, threads, device)


def _place(point: BandwidthPoint | GemmPoint) -> str:
    """Where it was measured: "2 threads" of the CPU, or the device."""
    return (
        f"{point.threads} thread{'s' if point.threads > 1 else ''}" if point.device == "cpu" else point.device
    )


class Roof(NamedTuple):
    """A rate that nothing is expected to exceed. stand_in: what it is if it is no stable peak."""

    rate: float
    stand_in: str = ""


def _alike(points: Iterable[RatedPoint], of: str, threads: int, device: str) -> list[RatedPoint]:
    return [point for point in points if (point.of, point.threads, point.device) == (of, threads, device)]


def _peak(points: Iterable[RatedPoint], of: str, threads: int, device: str) -> Interval | None:
    found = peak_of(_alike(points, of, threads, device))
    return found.rate if found else None


def _roof(points: tuple[RatedPoint, ...], of: str, threads: int, device: str) -> Roof | None:
    """The stable peak; else that of one thread times `threads`; else the fastest round there was."""
    if known := _peak(points, of, threads, device):
        return Roof(known.value)
    if alone := _peak(points, of, 1, device):
        return Roof(threads * alone.value, f"{threads} times that of one thread")
    rounds = (
        point.rate.value if point.rate else point.fastest or 0.0
        for point in _alike(points, of, threads, device)
    )
    fastest = max(rounds, default=0.0)
    return Roof(fastest, "its fastest round") if fastest else None
