"""The section on the diagnosis, and the roofline chart in it."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

import pytest

from components.measurements import (
    BandwidthPoint,
    CeilingsSpec,
    DiagnosisSpec,
    EngineDiagnosis,
    Finding,
    GemmPoint,
    Interval,
    LayerFigures,
)
from components.page.markup import to_html
from components.page.roofline import Point, roofline
from components.report.sections.diagnosis import diagnosis_section

CLASSES = {"fp32/eager": "k0", "int8/onnx": "k1", "int8/tensorrt": "k2"}


def certain(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


@pytest.fixture
def ceilings() -> CeilingsSpec:
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
    return CeilingsSpec(hardware={}, bandwidths=tuple(bandwidths), gemms=tuple(gemms))


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


def text_of(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_section_says_what_was_found(diagnosis: DiagnosisSpec, ceilings: CeilingsSpec) -> None:
    section = diagnosis_section(diagnosis, ceilings, CLASSES, "int8/onnx")
    text = text_of(section)
    assert "Dispatch-bound: 0.27 ms of arithmetic in 0.7 ms." in text
    assert "Not diagnosed: not built: no GPU" in text
    assert "The stem has 3 <b>channels</b>. Give it a stride." in text
    assert "Where the time of int8/onnx goes" in text
    assert "The 10 slowest layers" in text and "layer39.<script>" in text
    chosen = next(row for row in section.iter("tr") if row.get("class") == "chosen")
    assert "int8/onnx" in text_of(chosen) and "39" in text_of(chosen)
    assert len([row for row in section.iter("tr")]) == 1 + 3 + 1 + 10


def test_engines_of_a_gpu_have_a_picture_of_their_own(
    diagnosis: DiagnosisSpec, ceilings: CeilingsSpec
) -> None:
    on_gpu = diagnosis.engines["int8/onnx"].model_copy(update={"device": "cuda"})
    both = diagnosis.model_copy(update={"engines": {**diagnosis.engines, "int8/tensorrt": on_gpu}})
    gpu = {"device": "cuda", "threads": 1}
    known = CeilingsSpec(
        hardware={},
        bandwidths=(
            *ceilings.bandwidths,
            ceilings.bandwidths[1].model_copy(update={**gpu, "level": "device"}),
        ),
        gemms=ceilings.gemms + tuple(point.model_copy(update=gpu) for point in ceilings.gemms),
    )
    text = text_of(diagnosis_section(both, known, CLASSES, "int8/tensorrt"))
    assert "under the measured ceilings of 2 threads." in text
    assert "under the measured ceilings of the GPU." in text
    assert "device 20" in text
    alone = text_of(diagnosis_section(diagnosis, known, CLASSES, "int8/onnx"))
    assert "ceilings of the GPU" not in alone and "device 20" not in alone


def test_what_comes_from_outside_is_text(diagnosis: DiagnosisSpec, ceilings: CeilingsSpec) -> None:
    html = to_html(diagnosis_section(diagnosis, ceilings, CLASSES, "int8/onnx"))
    assert "<script" not in html and "<b>channels" not in html
    assert len(html.encode()) < 60_000


def test_without_a_choice_there_is_no_table_of_layers(
    diagnosis: DiagnosisSpec, ceilings: CeilingsSpec
) -> None:
    for chosen in (None, "int8/tensorrt"):
        assert "slowest layers" not in text_of(diagnosis_section(diagnosis, ceilings, CLASSES, chosen))


def test_without_ceilings_the_verdicts_are_left(diagnosis: DiagnosisSpec) -> None:
    empty = CeilingsSpec(hardware={}, bandwidths=(), gemms=())
    section = diagnosis_section(diagnosis, empty, CLASSES, "int8/onnx")
    assert not list(section.iter("svg"))
    assert "Dispatch-bound" in text_of(section)


@pytest.mark.parametrize("width", [350, 952])
def test_a_point_on_a_roof_is_drawn_on_it(ceilings: CeilingsSpec, width: float) -> None:
    points = [
        Point("at the peak", "k1", 20.0, 100.0),  # where fp32 is flat: on its line
        Point("at the slope", "k2", 1.0, 20.0),  # 20 GB/s times 1 flop/byte: on DRAM's
    ]
    chart = roofline(ceilings, points, threads=2, title="t", width=width)
    assert chart is not None
    peak, slope = ((float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in chart.iter("circle"))
    flat = [float(line.get("y1", "")) for line in chart.iter("line") if line.get("class") == "front"]
    assert min(abs(y - peak[1]) for y in flat) < 0.1
    assert any(_distance(path, slope) < 0.5 for path in chart.iter("path"))


def _distance(path: Element, point: tuple[float, float]) -> float:
    """Pixels from a point to a straight path, upright."""
    x1, y1, x2, y2 = map(float, re.findall(r"-?[\d.]+", path.get("d", "")))
    return abs(y1 + (y2 - y1) * (point[0] - x1) / (x2 - x1) - point[1])


def test_areas_are_as_the_shares(ceilings: CeilingsSpec) -> None:
    points = [Point("a", "k1", 1.0, 1.0, 0.4), Point("b", "k1", 2.0, 2.0, 0.1)]
    chart = roofline(ceilings, points, threads=2, title="t", width=952)
    assert chart is not None
    large, little = (float(dot.get("r", "")) for dot in chart.iter("circle"))
    assert (large / little) ** 2 == pytest.approx(4, rel=0.01)


def test_no_chart_of_nothing(ceilings: CeilingsSpec) -> None:
    assert roofline(ceilings, [], threads=2, title="t", width=952) is None
    assert roofline(ceilings, [Point("a", "k1", 1.0, 1.0)], threads=64, title="t", width=952) is None
