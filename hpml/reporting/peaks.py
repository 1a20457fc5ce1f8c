"""The peaks of a machine as pictures and a table: bandwidth by working set, matrix products by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec, RatedPoint, peak_of
from hpml.reporting import svg
from hpml.reporting.cells import Cell, Row, interval_cell
from hpml.reporting.colours import colour_classes

Point = BandwidthPoint | GemmPoint

_TOP, _BOTTOM, _LEFT, _RIGHT = 30, 48, 48, 12  # around a picture
_HEIGHT = 320


# ------------------------------------------------------------------------------------------ what is a peak


@dataclass(frozen=True)
class Peak:
    """The fastest of some points that is stable.

    place: "2 threads" or "GPU". of: "L2", or "fp32, torch (MKL)". rate: GB/s or Gflop/s; None with a
    reason. where: the kernel and the working set, or the size, that reached it.
    """

    place: str
    of: str
    rate: Interval | None
    where: str
    reason: str


def bandwidth_peaks(spec: PeaksSpec) -> list[Peak]:
    """The peak of each level of the memory in each place."""
    return _peaks(spec.bandwidths)


def gemm_peaks(spec: PeaksSpec) -> list[Peak]:
    """The peak of each precision and library in each place."""
    return _peaks(spec.gemms)


def _peaks(points: Sequence[RatedPoint]) -> list[Peak]:
    groups: dict[tuple[str, str], list[RatedPoint]] = {}
    for point in points:
        groups.setdefault((place_of(point), _roof_of(point)), []).append(point)
    return [_peak(place, name, group) for (place, name), group in groups.items()]


def _peak(place: str, name: str, points: Sequence[RatedPoint]) -> Peak:
    best = peak_of(points)
    if best is None:
        unstable = any(point.fastest for point in points)
        reason = "not stable" if unstable else points[0].reason.partition(":")[0]
        return Peak(place, name, None, "", reason)
    where = (
        f"{best.kernel}, {binary_size(best.working_set_bytes)}"
        if isinstance(best, BandwidthPoint)
        else f"n = {best.size:,}"
    )
    return Peak(place, name, best.rate, where, "")


def _roof_of(point: Point) -> str:
    """ "L2"; "GPU memory"; "host-to-device"; "fp32, torch (MKL)"."""
    if isinstance(point, GemmPoint):
        return curve_of(point)
    if point.level == "device":
        return "GPU memory"
    return point.device if point.level == "host" else point.level


def place_of(point: Point) -> str:
    """Where it was measured: "1 thread", "8 threads" of the CPU, or "GPU"."""
    if point.device != "cpu":
        return "GPU"
    return f"{point.threads} thread{'s' if point.threads > 1 else ''}"


def curve_of(point: Point) -> str:
    """What a curve is called: "triad", "copy, host-to-device"; "fp32, torch (MKL)"."""
    if isinstance(point, GemmPoint):
        return f"{point.precision}, {point.library}"
    return f"{point.kernel}, {point.device}" if point.level == "host" else point.kernel


def _at(point: Point) -> int:
    return point.working_set_bytes if isinstance(point, BandwidthPoint) else point.size


def binary_size(size_bytes: float) -> str:
    """A size as memory has them: "24 KiB", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"


def places_of(points: Sequence[Point]) -> list[str]:
    """Where these points were measured."""
    return list(dict.fromkeys(map(place_of, points)))


def curve_classes(points: Sequence[Point]) -> dict[str, str]:
    """A colour for each curve, the same in every place."""
    return colour_classes(dict.fromkeys(curve_of(point) for point in points if point.rate))


def peak_rows(peaks: Sequence[Peak], title: str) -> list[Row]:
    """A row for each level of the memory, or precision and library, a column for each place."""
    rows: dict[str, Row] = {}
    for peak in peaks:
        empty = {one.place: Cell("") for one in peaks}
        row = rows.setdefault(peak.of, {title: Cell(peak.of, style=""), **empty})
        rate = interval_cell(peak.rate, peak.reason)
        row[peak.place] = Cell(rate.text, (*rate.small, peak.where))
    return list(rows.values())


# ------------------------------------------------------------------------------------------------ the picture


def rate_picture(
    points: Sequence[Point], place: str, classes: Mapping[str, str], width: float
) -> Element | None:
    """GB/s against working set, or Gflop/s against the size of the matrices; None where nothing is stable.

    The scales are over all places, so that the pictures of two can be compared.
    """
    here = [point for point in points if place_of(point) == place]
    if not any(point.rate for point in here):
        return None
    is_memory = isinstance(points[0], BandwidthPoint)
    sizes = sorted({_at(point) for point in points})
    x = svg.padded(sizes, _LEFT, width - _RIGHT, log=True, by=0.03 if is_memory else 0.05)
    y = svg.padded(
        svg.ends(rate for point in points if (rate := point.rate)), _HEIGHT - _BOTTOM, _TOP, log=True, by=0.12
    )
    if is_memory:
        title, unit = "Memory bandwidth against working set", "GB/s"
        x_title = "working set"
        bands, ticks = _bands(here, x), _binary_ticks(x)
    else:
        title, unit = "Rate of matrix products against size", "Gflop/s"
        x_title = "size n of the square matrices"
        bands, ticks = [], [(x(size), f"{size:,}") for size in sizes]
    drawn = [
        *bands,
        *svg.x_axis_with(ticks, x, _TOP, _HEIGHT - _BOTTOM, f"{x_title} (log scale)"),
        *svg.y_axis(y, x.start, x.end, f"{place}: {unit} (log scale)"),
        *_curves(here, classes, x, y),
    ]
    return svg.picture(width, _HEIGHT, f"{title}: {place}", drawn)


def _curves(points: Sequence[Point], classes: Mapping[str, str], x: svg.Scale, y: svg.Scale) -> list[Element]:
    drawn: list[Element] = []
    for name, class_ in classes.items():
        stable = [
            (x(_at(point)), rate) for point in points if curve_of(point) == name and (rate := point.rate)
        ]
        if len(stable) > 1:
            drawn.append(svg.path([(at, y(rate.value)) for at, rate in stable], f"curve {class_}"))
        for at, rate in stable:
            drawn.append(svg.line(at, y(rate.low), at, y(rate.high), f"whisker {class_}"))
            drawn.append(svg.dot(at, y(rate.value), 2.5, f"point {class_}"))
    return drawn


def _bands(points: Sequence[Point], x: svg.Scale) -> list[Element]:
    """A shade from the smallest to the largest working set of each level, with its name."""
    sizes: dict[str, list[int]] = {}
    for point in points:
        if isinstance(point, BandwidthPoint):
            sizes.setdefault(point.level, []).append(point.working_set_bytes)
    drawn: list[Element] = []
    for level, of_level in sizes.items():
        left, right = x(min(of_level)) - 4, x(max(of_level)) + 4
        height = _HEIGHT - _BOTTOM - _TOP
        drawn.append(svg.node("rect", x=left, y=_TOP, width=right - left, height=height, class_="band"))
        drawn.append(svg.label(level, (left + right) / 2, _TOP + 12, "small", anchor="middle"))
    return drawn


def _binary_ticks(x: svg.Scale) -> list[tuple[float, str]]:
    """Powers of two bytes, as many as there is room for."""
    widest = svg.text_width("512 KiB") / 2 - _RIGHT
    exponents = [exponent for exponent in range(8, 48) if x.start <= x(2**exponent) <= x.end - widest]
    step = max(1, -(-len(exponents) * 62 // int(x.end - x.start)))
    return [(x(2**exponent), binary_size(2**exponent)) for exponent in exponents[::step]]
