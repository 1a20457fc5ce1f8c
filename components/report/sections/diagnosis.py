"""Why each engine is not faster: the roofline, a verdict each, and where the time of the chosen one goes."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, Finding, LayerFigures
from hpml.artifacts.peaks import PeaksSpec
from hpml.reporting.elements import breakable, drawing, keyed, nowrap, table
from hpml.reporting.format import ABSENT, percent, plain, sentence
from hpml.reporting.markup import Child, node
from hpml.reporting.roofline import Point, roofline

_LAYERS = 10  # in the table of the slowest
_PICTURED = 40  # in the chart of the layers

# The colour of a layer is that of what binds it.
_BOUND_CLASSES = {"compute": "k1", "memory": "k2", "overhead": "k0", None: "k0"}


def diagnosis_section(
    diagnosis: DiagnosisSpec, peaks: PeaksSpec | None, classes: dict[str, str], chosen: str | None
) -> Element:
    """The section of the report. classes: the colour of each engine; chosen: the engine shown by layer.

    Without peaks nothing is drawn under them.
    """
    peaks = peaks or PeaksSpec(hardware={}, bandwidths=(), gemms=())
    diagnosed = {name: one for name, one in diagnosis.engines.items() if one.status == "diagnosed"}
    return node(
        "section",
        node("h2", "Why it is not faster"),
        [_engines_chart(diagnosis, peaks, classes, device) for device in ("cpu", "cuda")],
        [node("p", sentence(note), class_="warning") for note in diagnosis.notes],
        _verdicts(diagnosis, classes, chosen),
        [_findings(name, one, classes[name]) for name, one in diagnosed.items() if one.findings],
        _layers(chosen, diagnosed[chosen], diagnosis, peaks) if chosen in diagnosed and chosen else None,
        class_="diagnosis",
    )


def _engines_chart(
    diagnosis: DiagnosisSpec, peaks: PeaksSpec, classes: dict[str, str], device: str
) -> Element | None:
    points = [
        Point(name, classes[name], one.flops / one.bytes, one.flops / one.time_us / 1e3)
        for name, one in diagnosis.engines.items()
        if one.status == "diagnosed" and one.device == device and one.bytes and one.time_us
    ]
    whose = f"{diagnosis.threads} threads" if device == "cpu" else "the GPU"
    caption = (
        f"Each engine at batch 1 under the measured peaks of {whose}. Under a slope, memory is the limit; "
        "under a flat line, arithmetic is; far below both, neither is."
    )
    title = "Roofline: arithmetic rate of each engine against its operations per byte"
    return drawing(
        lambda width: roofline(
            peaks, points, threads=diagnosis.threads, title=title, width=width, device=device
        ),
        caption,
    )


# -------------------------------------------------------------------------------------------- each engine


def _verdicts(diagnosis: DiagnosisSpec, classes: dict[str, str], chosen: str | None) -> Element:
    columns = ["engine", "bound by", "% of the peak"]
    rows = []
    for name, one in diagnosis.engines.items():
        cells: list[list[Child]] = [
            [keyed(name, classes[name])],
            [one.bound or ABSENT],
            [_share(one.share_of_roof)],
        ]
        shown = [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=True)]
        text = one.verdict if one.status == "diagnosed" else f"Not diagnosed: {one.reason}"
        shown.append(node("td", node("small", sentence(text)), class_="verdict", data_label="verdict"))
        rows.append(node("tr", shown, class_="chosen" if name == chosen else None))
    return table([*columns, "verdict"], rows)


def _findings(name: str, one: EngineDiagnosis, class_: str) -> Element:
    return node(
        "details",
        node("summary", node("span", "", class_=f"key {class_}"), " ", breakable(name)),
        node("ul", [node("li", _finding(finding)) for finding in one.findings]),
    )


def _finding(finding: Finding) -> list[Child]:
    remedy = node("small", sentence(finding.remedy), class_="note") if finding.remedy else None
    return [f"{sentence(finding.sentence)} ", remedy]


def _share(share: float | None) -> Element:
    return nowrap(ABSENT if share is None else plain(100 * share, significant=2))


# -------------------------------------------------------------------------------------------- by layer


def _layers(name: str, one: EngineDiagnosis, diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> Element | None:
    if not one.layers:
        return None
    slowest = sorted(one.layers, key=lambda layer: -layer.time_us)
    points = [
        Point(
            layer.name,
            _BOUND_CLASSES[layer.bound],
            layer.flops / layer.bytes,
            layer.flops / layer.time_us / 1e3,
            layer.time_us / one.profiled_us,
        )
        for layer in slowest[:_PICTURED]
        if layer.bytes and layer.time_us
    ]
    title = f"Roofline: each layer of {name}"
    caption = (
        "The area of a layer is its share of the time. Blue: bound by arithmetic; orange: by memory; grey: "
        "by neither. Layers without arithmetic are in the table only. A layer above a roof was faster than "
        "the matrix products or copies that the roofs were measured with."
    )
    return node(
        "div",
        node("h3", ["Where the time of ", *breakable(name), " goes"]),
        drawing(
            lambda width: roofline(
                peaks, points, threads=diagnosis.threads, title=title, width=width, device=one.device
            ),
            caption,
        ),
        _layer_table(slowest[:_LAYERS], one),
        node("p", _times_in_words(one, shown=min(_LAYERS, len(slowest))), class_="note"),
    )


def _layer_table(layers: list[LayerFigures], one: EngineDiagnosis) -> Element:
    columns = ["layer", "time, µs", "Gflop/s", "bound by", "% of the peak"]
    rows = []
    for layer in layers:
        rate = layer.flops / layer.time_us / 1e3 if layer.flops and layer.time_us else None
        cells: list[list[Child]] = [
            [node("span", breakable(layer.name)), node("small", f"{layer.op}, {layer.precision}")],
            [nowrap(plain(layer.time_us) if layer.time_us else "< 1"), _share_of_time(layer, one)],
            [nowrap(plain(rate) if rate else ABSENT)],
            [layer.bound or ABSENT],
            [_share(layer.share_of_roof)],
        ]
        pairs = zip(columns, cells, strict=True)
        rows.append(node("tr", [node("td", cell, data_label=column) for column, cell in pairs]))
    return table(columns, rows)


def _share_of_time(layer: LayerFigures, one: EngineDiagnosis) -> Element | None:
    return node("small", percent(layer.time_us / one.profiled_us)) if layer.time_us else None


def _times_in_words(one: EngineDiagnosis, *, shown: int) -> str:
    return (
        f"The {shown} slowest layers, with the share of the time of all. All add up to "
        f"{plain(one.profiled_us / 1e3)} ms in the profile; a request takes {plain(one.time_us / 1e3)} ms in "
        "the benchmark, without the profiler. Operations count 2 per multiply-accumulate; bytes are weights, "
        "inputs and outputs, each once. The peak of a layer is the slower of its arithmetic at the "
        "machine's fastest matrix product in its precision and its bytes at the bandwidth of the level of "
        "the memory that holds them."
    )
