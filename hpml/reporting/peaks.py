"""The peaks of a machine as pictures and a table: bandwidth by working set, matrix products by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec, RatedPoint, peak_of
from hpml.reporting.colours import COLOURS
from hpml.reporting.core_distances import cores_section
from hpml.reporting.elements import (
    HALF_PX,
    definitions,
    document,
    drawing,
    interval_cell,
    legend,
    nowrap,
    table,
)
from hpml.reporting.markup import Child, node
from hpml.reporting.svg import Scale, dot, label, line, padded, path, picture, text_width, y_axis

Point = BandwidthPoint | GemmPoint

_TOP, _BOTTOM, _LEFT, _RIGHT = 30, 48, 48, 12  # around a picture
_HEIGHT = 320

_HOW = (
    "Each point was measured once in every round, the points in random order; it is the mean over the rounds "
    "of the best of several goes, with its 95 % interval, and is left out where the rounds do not agree. "
)
_HOW_BANDWIDTH = (
    _HOW + "Bytes of all threads together, each pinned to a CPU with arrays of its own: triad (a = b + s·c) "
    "and copy through torch, dot through BLAS. In each shaded stretch one level of the memory holds all the "
    "arrays; what lies between is not measured."
)
_HOW_GEMM = (
    _HOW
    + "Square matrices, 2·n³ operations, through the libraries that torch and ONNX Runtime use, with the "
    "cost of the call, which keeps small products slow. U8S8: unsigned activations and signed weights."
)


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
    groups: dict[tuple[str, str], list[BandwidthPoint]] = {}
    for point in spec.bandwidths:
        groups.setdefault((place_of(point), _level_name(point)), []).append(point)
    return [
        _peak(place, name, points, lambda point: f"{point.kernel}, {binary_size(point.working_set_bytes)}")
        for (place, name), points in groups.items()
    ]


def gemm_peaks(spec: PeaksSpec) -> list[Peak]:
    """The peak of each precision and library in each place."""
    groups: dict[tuple[str, str], list[GemmPoint]] = {}
    for point in spec.gemms:
        groups.setdefault((place_of(point), curve_of(point)), []).append(point)
    return [
        _peak(place, name, points, lambda point: f"n = {point.size:,}")
        for (place, name), points in groups.items()
    ]


def _peak(place: str, name: str, points: Sequence[RatedPoint], where: Callable[[RatedPoint], str]) -> Peak:
    best = peak_of(points)
    if best is None:
        unstable = any(point.fastest for point in points)
        reason = "not stable" if unstable else points[0].reason.partition(":")[0]
        return Peak(place, name, None, "", reason)
    return Peak(place, name, best.rate, where(best), "")


def _level_name(point: BandwidthPoint) -> str:
    """ "L2"; "GPU memory"; "host-to-device"."""
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


# ------------------------------------------------------------------------------------------------ the section


def peaks_page(spec: PeaksSpec, cores: CoreDistances) -> str:
    """A page of its own, with the distance between the CPUs and the machine it holds for."""
    title = "The peaks of this machine"
    machine = node("section", node("h2", "The machine"), definitions(spec.hardware))
    return document(
        title, node("header", node("h1", title)), peaks_section(spec), cores_section(cores), machine
    )


def peaks_section(spec: PeaksSpec) -> Element:
    """Pictures and table of the peaks, and how they were measured."""
    return node(
        "section",
        node("h2", "What this machine can do at most"),
        node(
            "p",
            "A layer that moves B bytes and does F operations takes about the longer of B / bandwidth and "
            "F / rate with the best library here. An engine that comes near has nothing to gain but fewer "
            "bytes, or fewer operations, or a lower precision.",
        ),
        node("h3", "Memory bandwidth against working set"),
        *_chart(spec.bandwidths, bandwidth_picture, _HOW_BANDWIDTH),
        _table(bandwidth_peaks(spec), "level, GB/s"),
        node("h3", "Matrix products against size"),
        *_chart(spec.gemms, gemm_picture, _HOW_GEMM),
        _table(gemm_peaks(spec), "precision, Gflop/s"),
    )


Draw = Callable[[Sequence[Point], str, dict[str, str], float], Element | None]


def _chart(points: Sequence[Point], draw: Draw, caption: str) -> list[Child]:
    """A legend, a picture for each place, the caption."""
    classes = _classes(points)
    pictures = [
        drawing(lambda width, place=place: draw(points, place, classes, width), wide_px=HALF_PX)  # type: ignore[misc]
        for place in dict.fromkeys(place_of(point) for point in points)
    ]
    return [
        legend(classes.items()),
        node("div", pictures, class_="pair"),
        node("p", caption, class_="note"),
    ]


def _classes(points: Sequence[Point]) -> dict[str, str]:
    """A colour for each curve, the same in every place; after the last colour they begin again, dashed."""
    names = dict.fromkeys(curve_of(point) for point in points if point.rate)
    return {
        name: f"k{index % COLOURS + 1}{' again' if index >= COLOURS else ''}"
        for index, name in enumerate(names)
    }


def _table(peaks: Sequence[Peak], title: str) -> Element:
    places = list(dict.fromkeys(peak.place for peak in peaks))
    rows = []
    for name in dict.fromkeys(peak.of for peak in peaks):
        by_place = {peak.place: peak for peak in peaks if peak.of == name}
        cells = [_cell(by_place.get(place)) for place in places]
        rows.append(
            node(
                "tr",
                node("td", name, data_label=title),
                [node("td", cell, data_label=place) for place, cell in zip(places, cells, strict=True)],
            )
        )
    return table([title, *places], rows)


def _cell(peak: Peak | None) -> list[Child]:
    if peak is None:
        return [nowrap("")]
    where = node("small", peak.where) if peak.where else None
    return [*interval_cell(peak.rate, peak.reason), where]


# ----------------------------------------------------------------------------------------------- the pictures


def bandwidth_picture(
    points: Sequence[Point], place: str, classes: dict[str, str], width: float
) -> Element | None:
    """GB/s against working set in one place; None where nothing is stable there.

    The scales are over all places, so that the pictures of two can be compared.
    """
    here = [point for point in points if place_of(point) == place and isinstance(point, BandwidthPoint)]
    if not any(point.rate for point in here):
        return None
    x = padded([_at(point) for point in points], _LEFT, width - _RIGHT, log=True, by=0.03)
    y = _rate_scale(points)
    return picture(
        width,
        _HEIGHT,
        f"Memory bandwidth against working set: {place}",
        _bands(here, x),
        _size_axis(x),
        label("working set (log scale)", (x.start + x.end) / 2, _HEIGHT - 12, "axis", anchor="middle"),
        y_axis(y, _LEFT, width - _RIGHT, f"{place}: GB/s (log scale)"),
        _curves(here, classes, x, y),
    )


def gemm_picture(
    points: Sequence[Point], place: str, classes: dict[str, str], width: float
) -> Element | None:
    """Gflop/s against the size of the matrices in one place; None where nothing is stable there."""
    here = [point for point in points if place_of(point) == place]
    if not any(point.rate for point in here):
        return None
    sizes = sorted({_at(point) for point in points})
    x = padded(sizes, _LEFT, width - _RIGHT, log=True, by=0.05)
    y = _rate_scale(points)
    ticks = [line(x(size), _TOP, x(size), _HEIGHT - _BOTTOM, "grid") for size in sizes]
    names = [label(f"{size:,}", x(size), _HEIGHT - _BOTTOM + 17, anchor="middle") for size in sizes]
    return picture(
        width,
        _HEIGHT,
        f"Rate of matrix products against size: {place}",
        ticks,
        names,
        label(
            "size n of the square matrices (log scale)",
            (x.start + x.end) / 2,
            _HEIGHT - 12,
            "axis",
            anchor="middle",
        ),
        y_axis(y, _LEFT, width - _RIGHT, f"{place}: Gflop/s (log scale)"),
        _curves(here, classes, x, y),
    )


def _rate_scale(points: Sequence[Point]) -> Scale:
    rates = [rate for point in points if (rate := point.rate)]
    ends = [end for rate in rates for end in (rate.low, rate.high)]
    return padded(ends, _HEIGHT - _BOTTOM, _TOP, log=True, by=0.12)


def _curves(points: Sequence[Point], classes: dict[str, str], x: Scale, y: Scale) -> list[Element]:
    drawn: list[Element] = []
    for name, class_ in classes.items():
        stable = [
            (x(_at(point)), rate) for point in points if curve_of(point) == name and (rate := point.rate)
        ]
        if len(stable) > 1:
            drawn.append(path([(at, y(rate.value)) for at, rate in stable], f"curve {class_}"))
        for at, rate in stable:
            drawn += [
                line(at, y(rate.low), at, y(rate.high), f"whisker {class_}"),
                dot(at, y(rate.value), 2.5, f"point {class_}"),
            ]
    return drawn


def _bands(points: Sequence[BandwidthPoint], x: Scale) -> list[Element]:
    """A shade from the smallest to the largest working set of each level, with its name."""
    drawn: list[Element] = []
    for level in dict.fromkeys(point.level for point in points):
        sizes = [point.working_set_bytes for point in points if point.level == level]
        left, right = x(min(sizes)) - 4, x(max(sizes)) + 4
        height = _HEIGHT - _BOTTOM - _TOP
        drawn.append(node("rect", x=left, y=_TOP, width=right - left, height=height, class_="band"))
        drawn.append(label(level, (left + right) / 2, _TOP + 12, "small", anchor="middle"))
    return drawn


def _size_axis(x: Scale) -> list[Element]:
    """Powers of two bytes along the bottom, as many as there is room for."""
    widest = text_width("512 KiB") / 2 - _RIGHT
    exponents = [exponent for exponent in range(8, 48) if x.start <= x(2**exponent) <= x.end - widest]
    step = max(1, -(-len(exponents) * 62 // int(x.end - x.start)))
    drawn: list[Element] = []
    for exponent in exponents[::step]:
        at = x(2**exponent)
        drawn += [
            line(at, _TOP, at, _HEIGHT - _BOTTOM, "grid"),
            label(binary_size(2**exponent), at, _HEIGHT - _BOTTOM + 17, anchor="middle"),
        ]
    return drawn
