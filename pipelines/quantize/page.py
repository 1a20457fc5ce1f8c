"""The page of `hpml quantize`: is the int8 model good enough, how small, how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.pipelines.command_pages.bench import conditions_section, figures_sections
from hpml.pipelines.quantize.job import Bounds, Judgement, Quantized
from hpml.reporting.colours import colour_classes
from hpml.reporting.elements import breakable, definitions, document, keyed, nowrap, table
from hpml.reporting.format import ABSENT, TIMES, bounds, plain
from hpml.reporting.markup import node

_HOW = (
    "The samples used for judging were not used for calibration. Accuracies have Wilson's 95 % interval, "
    "their change Tango's on the very same samples. Relative error: the root of the mean square of the "
    "differences from the fp32 model's answers, as a share of that of the answers."
)

Cell = tuple[str, str]  # a figure, and what is small beside it: its interval, or why there is none


@dataclass(frozen=True)
class Pair:
    """The two models. names: of fp32 and int8, as in `speed`. speed_reason: why there is no speed."""

    names: tuple[str, str]
    sizes_bytes: tuple[int, int]
    found: Quantized
    limits: Bounds
    speed: MeasurementsSpec | None = None
    speed_reason: str = ""
    warnings: tuple[str, ...] = ()  # what whoever reads the speed should know

    @property
    def measured(self) -> Mapping[str, EngineFigures]:
        """The figures of both; empty where the speed was not measured."""
        return self.speed.engines if self.speed else {}


def verdict_in_words(pair: Pair) -> str:
    """What came of it, in a sentence."""
    refusal = pair.found.judgement.refusal
    if refusal:
        return f"Refused: {refusal}."
    before, after = pair.sizes_bytes
    size = f"{before / after:.2g} times smaller" if after < before else f"{after / before:.2g} times as large"
    ratio = pair.measured[pair.names[1]].speedup_vs_reference if pair.measured else None
    if ratio is None:
        why = pair.speed_reason or (pair.speed.incomplete if pair.speed else "")
        return (
            f"Passed the gate, and {size}. How fast it is was not measured: {why}. "
            f"To measure it: hpml bench {pair.names[0]} {pair.names[1]}"
        )
    told = f"{plain(ratio.value)} times as fast as fp32 ({bounds(ratio)})"
    if ratio.high < 1:
        return f"Passed the gate, and {size}, but slower: {told}. Keep the fp32 model where speed counts."
    if ratio.low <= 1:
        return f"Passed the gate, and {size}; neither is clearly faster: {told}."
    return f"Passed the gate, {size}, {told}."


def model_rows(pair: Pair) -> list[dict[str, Cell]]:
    """A row for each of the two, by columns."""
    judged = pair.found.judgement
    rows = []
    for name, size_bytes, accuracy in zip(
        pair.names, pair.sizes_bytes, (judged.accuracy_fp32, judged.accuracy_int8), strict=True
    ):
        figures = pair.measured.get(name)
        rows.append(
            {
                "model": (name, ""),
                "MB": (plain(size_bytes / 1e6), ""),
                "top-1 %": _cell(accuracy, 100.0, "no labels"),
                "p50 ms": _cell(figures.latency_ms_p50 if figures else None, 1.0, "not measured"),
                f"{TIMES} fp32": _cell(
                    figures.speedup_vs_reference if figures else None, 1.0, "not measured"
                ),
            }
        )
    return rows


def _cell(interval: Interval | None, scale: float, absent: str) -> Cell:
    if interval is None:
        return ABSENT, absent
    value = plain(interval.value * scale)
    return value, "" if interval.low == interval.high else bounds(interval, scale=scale)


def gate_rows(judged: Judgement, limits: Bounds) -> list[dict[str, Cell]]:
    """What was judged, what was found, what is allowed."""
    rows = []
    if judged.accuracy_change is not None:
        rows.append(
            _gate_row(
                "change of top-1, points",
                _cell(judged.accuracy_change, 100.0, ""),
                f"at least {plain(0.0 - 100 * limits.max_accuracy_drop)}",
            )
        )
    if judged.top1_agreement is not None:
        required = f"at least {plain(100 * limits.min_top1_agreement)}"
        rows.append(_gate_row("same class as fp32, %", _cell(judged.top1_agreement, 100.0, ""), required))
    relative = f"at most {limits.max_relative_error:g}" if not judged.is_classes else "not judged"
    rows.append(
        _gate_row(f"relative error of {judged.output}", (f"{judged.relative_error:.2g}", ""), relative)
    )
    rows.append(_gate_row("largest difference", (f"{judged.max_abs_error:.2g}", ""), "not judged"))
    rows.append(_gate_row("NaN or infinity", (f"{judged.nan + judged.infinite:,}", ""), "none"))
    return rows


def _gate_row(what: str, found: Cell, allowed: str) -> dict[str, Cell]:
    return {"gate": (what, ""), "found": found, "allowed": (allowed, "")}


def how_in_words(found: Quantized) -> list[str]:
    """How it was quantized, sentence by sentence."""
    counts = ", ".join(f"{count} {op}" for op, count in found.quantized.items())
    left = ", ".join(f"{count} {op}" for op, count in found.left.items()) or "none"
    return [
        f"Weights: int8 per channel, {found.weight_bits} bits. Activations: {found.activations}.",
        f"Calibrated on {_samples(found.calibrated)}, "
        f"judged on {_samples(found.judgement.samples, 'other ')}.",
        f"In int8: {counts}. In fp32: {left}.",
        *(f"Note: {note}." for note in found.notes),
    ]


def _samples(count: int, which: str = "") -> str:
    return f"{count:,} {which}sample{'' if count == 1 else 's'}"


def quantize_page(pair: Pair, *, facts: Mapping[str, str]) -> str:
    """The whole HTML document. facts: what the figures depend on."""
    refused = bool(pair.found.judgement.refusal)
    classes = colour_classes(pair.names, reference=pair.names[0])
    title = f"{pair.names[0]} in int8"
    speed = pair.speed
    return document(
        title,
        node(
            "header",
            node("p", "hpml quantize", class_="eyebrow none" if refused else "eyebrow"),
            node("h1", breakable(title)),
            node("p", verdict_in_words(pair), class_="lead"),
            [node("p", warning, class_="warning") for warning in pair.warnings],
        ),
        node("section", node("h2", "Both models"), _table(model_rows(pair), classes)),
        node(
            "section",
            node("h2", "The gate"),
            _table(gate_rows(pair.found.judgement, pair.limits), {}),
            node("p", _HOW, class_="note"),
        ),
        node("section", node("h2", "How"), [node("p", sentence) for sentence in how_in_words(pair.found)]),
        *(figures_sections(speed, classes) if speed and speed.engines else ()),
        conditions_section(speed) if speed else None,
        node("section", node("h2", "Machine and versions"), definitions(facts)),
    )


def _table(rows: Sequence[Mapping[str, Cell]], classes: Mapping[str, str]) -> Element:
    shown = [
        node(
            "tr",
            [
                node(
                    "td",
                    keyed(value, classes[value]) if value in classes else nowrap(value),
                    node("small", small) if small else None,
                    data_label=column,
                )
                for column, (value, small) in row.items()
            ],
        )
        for row in rows
    ]
    return table(rows[0], shown)
