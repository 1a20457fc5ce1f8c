"""Why each engine is not faster: pictures and tables of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, LayerFigures
from hpml.artifacts.peaks import PeaksSpec
from hpml.reporting.cells import Cell, Row, named
from hpml.reporting.format import ABSENT, percent, plain, sentence
from hpml.reporting.roofline import Point, roofline

_PICTURED = 40  # layers of the chart

# The colour of a layer is that of what binds it.
_BOUND_CLASSES = {"compute": "k1", "memory": "k2", "overhead": "k0", None: "k0"}


def engines_roofline(
    diagnosis: DiagnosisSpec, peaks: PeaksSpec | None, classes: Mapping[str, str], device: str, width: float
) -> Element | None:
    """The engines that `device` runs, under its peaks."""
    points = [
        Point(name, classes[name], one.flops / one.bytes, one.flops / one.time_us / 1e3)
        for name, one in diagnosis.engines.items()
        if one.status == "diagnosed" and one.device == device and one.bytes and one.time_us
    ]
    title = "Roofline: arithmetic rate of each engine against its operations per byte"
    return roofline(peaks, points, threads=diagnosis.threads, title=title, width=width, device=device)


def verdict_rows(diagnosis: DiagnosisSpec, classes: Mapping[str, str]) -> list[Row]:
    """What binds each engine."""
    return [
        {
            "engine": named(name, classes),
            "bound by": Cell(one.bound or ABSENT, style=""),
            "% of the peak": _share(one.share_of_roof),
            "verdict": Cell("", (sentence(_verdict(one)),), style=""),
        }
        for name, one in diagnosis.engines.items()
    ]


def _verdict(one: EngineDiagnosis) -> str:
    return one.verdict if one.status == "diagnosed" else f"Not diagnosed: {one.reason}"


def _share(share: float | None) -> Cell:
    return Cell(ABSENT if share is None else plain(100 * share, significant=2))


def slowest(one: EngineDiagnosis) -> list[LayerFigures]:
    """Its layers, the slowest first."""
    return sorted(one.layers, key=lambda layer: -layer.time_us)


def layers_roofline(
    name: str, one: EngineDiagnosis, peaks: PeaksSpec | None, threads: int, width: float
) -> Element | None:
    """The slowest layers of an engine, as large as their shares of the time, under the peaks."""
    points = [
        Point(
            layer.name,
            _BOUND_CLASSES[layer.bound],
            layer.flops / layer.bytes,
            layer.flops / layer.time_us / 1e3,
            layer.time_us / one.profiled_us,
        )
        for layer in slowest(one)[:_PICTURED]
        if layer.bytes and layer.time_us
    ]
    title = f"Roofline: each layer of {name}"
    return roofline(peaks, points, threads=threads, title=title, width=width, device=one.device)


def layer_rows(one: EngineDiagnosis, most: int) -> list[Row]:
    """The slowest layers, with their share of the time of all."""
    return [
        {
            "layer": Cell(layer.name, (f"{layer.op}, {layer.precision}",), style=""),
            "time, µs": _time(layer.time_us, one.profiled_us),
            "Gflop/s": _rate(layer),
            "bound by": Cell(layer.bound or ABSENT, style=""),
            "% of the peak": _share(layer.share_of_roof),
        }
        for layer in slowest(one)[:most]
    ]


def _time(time_us: float, profiled_us: float) -> Cell:
    return Cell(plain(time_us), (percent(time_us / profiled_us),)) if time_us else Cell("< 1")


def _rate(layer: LayerFigures) -> Cell:
    return Cell(plain(layer.flops / layer.time_us / 1e3) if layer.flops and layer.time_us else ABSENT)
