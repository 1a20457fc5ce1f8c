"""The section on the diagnosis, and the roofline chart in it."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree.ElementTree import Element

import pytest

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, Finding, LayerFigures
from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec
from hpml.components.report import diagnosis as diagnosing
from hpml.reporting import rendering
from hpml.reporting.colours import colour_classes
from hpml.reporting.format import shorten
from hpml.reporting.roofline import Point, roofline
from tests.html_elements import parsed

CLASSES = {"fp32/eager": "k0", "int8/onnx": "k1", "int8/tensorrt": "k2"}


def certain(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


@pytest.fixture
def peaks() -> PeaksSpec:
    bandwidths = [
        BandwidthPoint(
            device="cpu",
            kernel="triad",
            threads=2,
            working_set_bytes=size,
            level=level,
            gb_per_s=certain(rate),
        )
        for level, size, rate in (("L2", 1_000_000, 200.0), ("DRAM", 10**8, 20.0))
    ]
    gemms = [
        GemmPoint(
            device="cpu", precision=precision, library="x", threads=2, size=1024, gflop_per_s=certain(rate)
        )
        for precision, rate in (("fp32", 100.0), ("int8", 400.0))
    ]
    return PeaksSpec(hardware={}, bandwidths=tuple(bandwidths), gemms=tuple(gemms))


@pytest.fixture
def diagnosis() -> DiagnosisSpec:
    layers = tuple(
        LayerFigures(
            name=f"layer{index}.<script>",
            op="QLinearConv",
            precision="int8",
            flops=1_000_000 * index,
            bytes=40_000,
            time_us=10.0 + index,
            bound="compute" if index % 2 else "overhead",
            share_of_roof=0.4 if index else None,
        )
        for index in range(40)
    )
    finding = Finding(rule="stem", sentence="the stem has 3 <b>channels</b>", remedy="give it a stride")
    one = EngineDiagnosis(
        status="diagnosed",
        flops=50_000_000,
        bytes=2_000_000,
        time_us=700.0,
        profiled_us=1180.0,
        roof_us=270.0,
        share_of_roof=0.386,
        bound="overhead",
        layers=layers,
        verdict="dispatch-bound: 0.27 ms of arithmetic in 0.7 ms.",
        findings=(finding,) * 8,
    )
    return DiagnosisSpec(
        threads=2,
        engines={
            "fp32/eager": one.model_copy(update={"findings": (), "time_us": 2000.0}),
            "int8/onnx": one,
            "int8/tensorrt": EngineDiagnosis(status="not diagnosed", reason="not built: no GPU"),
        },
    )


def section_html(
    diagnosis: DiagnosisSpec, peaks: PeaksSpec, classes: dict[str, str], chosen: str | None
) -> str:
    template = rendering.macros("components/report/templates/diagnosis.html", diagnosing=diagnosing)
    return str(template.diagnosis_section(diagnosis, peaks, classes, chosen))


def diagnosis_section(*given: Any) -> Element:
    return parsed(section_html(*given))


def text_of(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_section_says_what_was_found(diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> None:
    section = diagnosis_section(diagnosis, peaks, CLASSES, "int8/onnx")
    text = text_of(section)
    assert "Dispatch-bound: 0.27 ms of arithmetic in 0.7 ms." in text
    assert "Not diagnosed: not built: no GPU" in text
    assert "The stem has 3 <b>channels</b>. Give it a stride." in text
    assert "Where the time of int8/onnx goes" in text
    assert "The 10 slowest layers" in text and "layer39.<script>" in text
    chosen = next(row for row in section.iter("tr") if row.get("class") == "chosen")
    assert "int8/onnx" in text_of(chosen) and "39" in text_of(chosen)
    assert len([row for row in section.iter("tr")]) == 1 + 3 + 1 + 10


def test_engines_of_a_gpu_have_a_picture_of_their_own(diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> None:
    on_gpu = diagnosis.engines["int8/onnx"].model_copy(update={"device": "cuda"})
    both = diagnosis.model_copy(update={"engines": {**diagnosis.engines, "int8/tensorrt": on_gpu}})
    gpu = {"device": "cuda", "threads": 1}
    known = PeaksSpec(
        hardware={},
        bandwidths=(
            *peaks.bandwidths,
            peaks.bandwidths[1].model_copy(update={**gpu, "level": "device"}),
        ),
        gemms=peaks.gemms + tuple(point.model_copy(update=gpu) for point in peaks.gemms),
    )
    text = text_of(diagnosis_section(both, known, CLASSES, "int8/tensorrt"))
    assert "under the measured peaks of 2 threads." in text
    assert "under the measured peaks of the GPU." in text
    assert "device 20" in text
    alone = text_of(diagnosis_section(diagnosis, known, CLASSES, "int8/onnx"))
    assert "peaks of the GPU" not in alone and "device 20" not in alone


def test_what_comes_from_outside_is_text(diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> None:
    html = section_html(diagnosis, peaks, CLASSES, "int8/onnx")
    assert "<script" not in html and "<b>channels" not in html
    assert len(html.encode()) < 60_000


def test_without_a_choice_there_is_no_table_of_layers(diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> None:
    for chosen in (None, "int8/tensorrt"):
        assert "slowest layers" not in text_of(diagnosis_section(diagnosis, peaks, CLASSES, chosen))


def test_without_peaks_the_verdicts_are_left(diagnosis: DiagnosisSpec) -> None:
    empty = PeaksSpec(hardware={}, bandwidths=(), gemms=())
    section = diagnosis_section(diagnosis, empty, CLASSES, "int8/onnx")
    assert not list(section.iter("svg"))
    assert "Dispatch-bound" in text_of(section)


@pytest.mark.parametrize("width", [350, 952])
def test_a_point_on_a_roof_is_drawn_on_it(peaks: PeaksSpec, width: float) -> None:
    points = [
        Point("at the peak", "k1", 20.0, 100.0),  # where fp32 is flat: on its line
        Point("at the slope", "k2", 1.0, 20.0),  # 20 GB/s times 1 flop/byte: on DRAM's
    ]
    chart = roofline(peaks, points, threads=2, title="t", width=width)
    assert chart is not None
    peak, slope = ((float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in chart.iter("circle"))
    flat = [float(line.get("y1", "")) for line in chart.iter("line") if line.get("class") == "front"]
    assert min(abs(y - peak[1]) for y in flat) < 0.1
    assert any(_distance(path, slope) < 0.5 for path in chart.iter("path"))


def _distance(path: Element, point: tuple[float, float]) -> float:
    """Pixels from a point to a straight path, upright."""
    x1, y1, x2, y2 = map(float, re.findall(r"-?[\d.]+", path.get("d", "")))
    return abs(y1 + (y2 - y1) * (point[0] - x1) / (x2 - x1) - point[1])


def test_areas_are_as_the_shares(peaks: PeaksSpec) -> None:
    points = [Point("a", "k1", 1.0, 1.0, 0.4), Point("b", "k1", 2.0, 2.0, 0.1)]
    chart = roofline(peaks, points, threads=2, title="t", width=952)
    assert chart is not None
    large, little = (float(dot.get("r", "")) for dot in chart.iter("circle"))
    assert (large / little) ** 2 == pytest.approx(4, rel=0.01)


def test_no_chart_of_nothing(peaks: PeaksSpec) -> None:
    assert roofline(peaks, [], threads=2, title="t", width=952) is None
    assert roofline(peaks, [Point("a", "k1", 1.0, 1.0)], threads=64, title="t", width=952) is None


def test_layers_too_short_to_be_timed_have_no_share(diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> None:
    one = diagnosis.engines["int8/onnx"]
    short = tuple(layer.model_copy(update={"time_us": 0.0}) for layer in one.layers)
    fast = one.model_copy(update={"layers": short, "profiled_us": 0.0, "time_us": 4.6})
    spec = diagnosis.model_copy(update={"engines": {**diagnosis.engines, "int8/onnx": fast}})
    text = text_of(diagnosis_section(spec, peaks, CLASSES, "int8/onnx"))
    assert "< 1" in text and "All add up to 0 ms in the profile" in text


# Two pairs that all but coincide, and names as long as they come: what stood at wrong dots.
CROWDED = {
    "fp32/eager": (12.2, 34.0),
    "fp32/onnx": (12.1, 80.0),
    "int8/onnx": (44.0, 220.0),
    "pruned/onnx": (11.2, 57.0),
    "pruned-distilled/onnx": (11.2, 56.0),
    "pruned-distilled-int8/onnx": (38.0, 73.0),
    "pruned-int8/onnx": (38.5, 71.0),
    "pruned75-distilled/onnx": (9.5, 40.0),
    "pruned75-distilled-int8/onnx": (30.0, 50.0),
}


def _number(element: Element, name: str) -> float:
    return float(element.get(name, ""))


def _extent(name: Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a name's letters."""
    width = 0.5 * 12 * len(name.text or "")
    left = _number(name, "x") - {None: 0.0, "middle": width / 2, "end": width}[name.get("text-anchor")]
    return left, _number(name, "y") - 9, left + width, _number(name, "y") + 2


def _gap(dot: Element, extent: tuple[float, float, float, float]) -> float:
    """Pixels from the edge of a dot to letters; negative where it covers them."""
    left, top, right, bottom = extent
    x, y = _number(dot, "cx"), _number(dot, "cy")
    near_x, near_y = min(max(x, left), right), min(max(y, top), bottom)
    return math.dist((x, y), (near_x, near_y)) - _number(dot, "r")


def _misplaced(chart: Element) -> list[str]:
    """Names that cover a dot or another name, or that do not tell which dot is theirs."""
    dots = list(chart.iter("circle"))
    names = [text for text in chart.iter("text") if text.get("class") == "name"]
    leaders = [line for line in chart.iter("line") if (line.get("class") or "").startswith("leader")]
    wrong = []
    for name in names:
        extent = _extent(name)
        own = dots[[name.text in (point, shorten(point, 22)) for point in CROWDED].index(True)]
        class_ = (own.get("class") or "").partition(" ")[2]
        gaps = {dot: _gap(dot, extent) for dot in dots}
        led = any(
            line.get("class") == f"leader {class_}"
            and _gap(own, (_number(line, "x1"), _number(line, "y1")) * 2) < 0.2
            and extent[0] - 12 <= _number(line, "x2") <= extent[2] + 12
            and extent[1] - 6 <= _number(line, "y2") <= extent[3] + 6
            for line in leaders
        )
        if min(gaps.values()) < 0:
            wrong.append(f"{name.text} covers a dot")
        if min(gaps, key=lambda dot: gaps[dot]) is not own and not led:
            wrong.append(f"{name.text} is nearer to another dot and has no line to its own")
        for other in names:
            a, b = extent, _extent(other)
            if other is not name and a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
                wrong.append(f"{name.text} covers {other.text}")
    return wrong


@pytest.mark.parametrize("width", [350, 466, 952])
def test_every_name_in_a_crowded_roofline_is_at_its_own_dot(peaks: PeaksSpec, width: float) -> None:
    classes = colour_classes(CROWDED, reference="fp32/eager")
    points = [Point(name, classes[name], *at) for name, at in CROWDED.items()]
    chart = roofline(peaks, points, threads=2, title="t", width=width)
    assert chart is not None
    assert len([text for text in chart.iter("text") if text.get("class") == "name"]) == len(points)
    assert _misplaced(chart) == []


def test_of_two_dots_at_one_place_both_are_seen(peaks: PeaksSpec) -> None:
    points = [Point("a/onnx", "k1", 10.0, 50.0), Point("b/onnx", "k2", 10.0, 50.5)]
    chart = roofline(peaks, points, threads=2, title="t", width=952)
    assert chart is not None
    below, above = (_number(dot, "r") for dot in chart.iter("circle"))
    assert below >= above + 2


@pytest.mark.parametrize("width", [350, 952])
def test_names_of_roofs_that_all_but_coincide_do_not_cover_each_other(peaks: PeaksSpec, width: float) -> None:
    near = peaks.bandwidths[0].model_copy(update={"level": "L1", "gb_per_s": certain(205.0)})
    close = peaks.gemms[1].model_copy(update={"precision": "bf16", "gflop_per_s": certain(405.0)})
    spec = peaks.model_copy(update={"bandwidths": (near, *peaks.bandwidths), "gemms": (*peaks.gemms, close)})
    chart = roofline(spec, [Point("a", "k1", 1.0, 10.0)], threads=2, title="t", width=width)
    assert chart is not None
    names = [text for text in chart.iter("text") if text.get("class") == "small name"]
    starts = [(_number(name, "x"), _number(name, "y")) for name in names if name.get("transform")]
    assert len(starts) == 3
    assert math.dist(starts[0], starts[1]) > 12, "beside each other or on two sides"
    int8, bf16 = (_extent(name) for name in names if re.match("int8|bf16", name.text or ""))
    assert int8[2] <= bf16[0] or bf16[2] <= int8[0] or int8[3] <= bf16[1] or bf16[3] <= int8[1]
