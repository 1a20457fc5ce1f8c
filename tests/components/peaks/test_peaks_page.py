"""The pictures and the table show every stable point, say what is missing, and hold against odd specs."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element

import pytest

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec
from hpml.pipelines.command_pages.machine import machine_page
from hpml.reporting import rendering
from hpml.reporting.peaks import (
    bandwidth_peaks,
    binary_size,
    gemm_peaks,
)
from tests.html_elements import parsed

KIB = 2**10
ONE_CPU = CoreDistances(cpus=(0,), usable_cpus=1)
LEVELS = {"L1": (16 * KIB, 200.0), "L2": (256 * KIB, 110.0), "DRAM": (2**27, 30.0)}


def interval(value: float) -> Interval:
    return Interval(value=value, low=value * 0.98, high=value * 1.02)


def bandwidths(device: str = "cpu", threads: int = 1) -> Iterable[BandwidthPoint]:
    for level, (size, rate) in LEVELS.items():
        for kernel in ("triad", "dot", "copy"):
            yield BandwidthPoint(
                device=device,
                kernel=kernel,
                threads=threads,
                working_set_bytes=size * threads,
                level=level,
                gb_per_s=interval(rate * threads),
            )


def gemms(threads: int = 1, libraries: int = 2) -> Iterable[GemmPoint]:
    for library in range(libraries):
        for size in (64, 512):
            yield GemmPoint(
                device="cpu",
                precision="fp32",
                library=f"library {library}",
                threads=threads,
                size=size,
                gflop_per_s=interval(size * threads * (library + 1)),
            )


@pytest.fixture
def spec() -> PeaksSpec:
    return PeaksSpec(
        hardware={"cpu": "a <CPU>"},
        bandwidths=(*bandwidths(), *bandwidths(threads=4)),
        gemms=(*gemms(), *gemms(threads=4)),
    )


def peaks_section(spec: PeaksSpec) -> Element:
    return parsed(rendering.macros("reporting/templates/elements.html").peaks_section(spec))


def text_of(section: Element) -> str:
    return "".join(section.itertext())


def dots(section: Element) -> int:
    return sum(1 for element in section.iter("circle"))


def test_every_stable_point_is_drawn_for_desktop_and_phone(spec: PeaksSpec) -> None:
    section = peaks_section(spec)
    assert dots(section) == 2 * (len(spec.bandwidths) + len(spec.gemms))
    assert len(list(section.iter("svg"))) == 2 * 4  # two thread counts, two pictures
    texts = {element.text for element in section.iter("text")}
    assert {"L1", "L2", "DRAM", "64", "512", "128 KiB"} <= texts


def test_nothing_is_drawn_outside_its_picture(spec: PeaksSpec) -> None:
    for svg in peaks_section(spec).iter("svg"):
        width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
        for circle in svg.iter("circle"):
            assert 0 <= float(circle.get("cx", -1)) <= width
            assert 0 <= float(circle.get("cy", -1)) <= height
        for text in svg.iter("text"):
            assert 0 <= float(text.get("x", -1)) <= width


def test_a_point_that_is_not_stable_is_not_drawn_and_its_peak_says_so(spec: PeaksSpec) -> None:
    unstable = [
        point.model_copy(update={"gb_per_s": None, "reason": "not stable: ...", "fastest": 250.0})
        if (point.level, point.threads) == ("L1", 1)
        else point
        for point in spec.bandwidths
    ]
    section = peaks_section(spec.model_copy(update={"bandwidths": tuple(unstable)}))
    assert dots(section) == 2 * (len(spec.bandwidths) - 3 + len(spec.gemms))
    assert "not stable" in text_of(section)


def test_a_peak_without_a_stable_point_is_not_known_yet(spec: PeaksSpec) -> None:
    assert spec.not_stable == ""
    unstable = {"reason": "not stable: ...", "fastest": 9e9}
    lost = [
        point.model_copy(update={"gb_per_s": None, **unstable}) if point.level != "L2" else point
        for point in spec.bandwidths
    ]
    too_slow = [point.model_copy(update={"gflop_per_s": None, "reason": "too slow"}) for point in spec.gemms]
    missing = spec.model_copy(update={"bandwidths": tuple(lost), "gemms": tuple(too_slow)}).not_stable
    assert missing == "1 thread: L1, DRAM; 4 threads: L1, DRAM"


def test_the_table_has_the_fastest_of_each_level_and_library(spec: PeaksSpec) -> None:
    found = {(c.place, c.of): (c.rate.value if c.rate else None, c.where) for c in bandwidth_peaks(spec)}
    assert found[("1 thread", "L1")] == (200, "triad, 16 KiB")
    assert found[("4 threads", "DRAM")] == (120, "triad, 512 MiB")
    products = {(c.place, c.of): (c.rate.value if c.rate else None, c.where) for c in gemm_peaks(spec)}
    assert products[("4 threads", "fp32, library 1")] == (4096, "n = 512")
    text = text_of(peaks_section(spec))
    assert "4,096" in text and "196–204" in text  # noqa: RUF001


def test_a_gpu_is_a_place_of_its_own_with_the_ways_to_it(spec: PeaksSpec) -> None:
    copies = [
        BandwidthPoint(
            device=device,
            kernel="copy",
            threads=1,
            working_set_bytes=2**exponent,
            level="host",
            gb_per_s=interval(25),
        )
        for device in ("host-to-device", "device-to-host")
        for exponent in (20, 28)
    ]
    memory = BandwidthPoint(
        device="cuda",
        kernel="triad",
        threads=1,
        working_set_bytes=2**28,
        level="device",
        gb_per_s=interval(4000),
    )
    section = peaks_section(spec.model_copy(update={"bandwidths": (*spec.bandwidths, *copies, memory)}))
    page = text_of(section)
    assert "copy, host-to-device" in page and "GPU memory" in page
    assert dots(section) == 2 * (len(spec.bandwidths) + 5 + len(spec.gemms))


@pytest.mark.parametrize("gone", ["bandwidths", "gemms", "figures"])
def test_a_spec_without_figures_is_a_page_nevertheless(spec: PeaksSpec, gone: str) -> None:
    if gone == "figures":
        bare = PeaksSpec(
            hardware={},
            bandwidths=tuple(p.model_copy(update={"gb_per_s": None, "reason": "x"}) for p in spec.bandwidths),
            gemms=tuple(p.model_copy(update={"gflop_per_s": None, "reason": "x"}) for p in spec.gemms),
        )
    else:
        bare = spec.model_copy(update={gone: ()})
    page = machine_page(bare, ONE_CPU)
    assert page.startswith("<!DOCTYPE html>") and "nan" not in page.lower().replace("nano", "")


def test_what_comes_from_outside_is_escaped(spec: PeaksSpec) -> None:
    hostile = spec.model_copy(
        update={"hardware": {"cpu": "<script>x</script>"}, "gemms": (gemm_of("<img src=x>"),)}
    )
    page = machine_page(hostile, ONE_CPU)
    assert "<script" not in page and "<img" not in page


def gemm_of(library: str) -> GemmPoint:
    return next(iter(gemms())).model_copy(update={"library": library})


@pytest.mark.parametrize(
    ("size", "text"), [(192, "192 B"), (24 * KIB, "24 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**31, "2 GiB")]
)
def test_sizes_are_written_as_memory_has_them(size: float, text: str) -> None:
    assert binary_size(size) == text
