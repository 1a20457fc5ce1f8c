"""The page of `hpml quantize`: is the int8 model good enough, how small, how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.pipelines.command_pages import pictures, tables
from hpml.pipelines.quantize.job import Bounds, Judgement, Quantized
from hpml.reporting import rendering
from hpml.reporting.cells import Cell, Row, interval_cell, named
from hpml.reporting.colours import colour_classes
from hpml.reporting.format import TIMES, bounds, plain


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
    def classes(self) -> dict[str, str]:
        """The colours of the two."""
        return colour_classes(self.names, reference=self.names[0])

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


def model_rows(pair: Pair) -> list[Row]:
    """A row for each of the two."""
    judged = pair.found.judgement
    accuracies = (judged.accuracy_fp32, judged.accuracy_int8)
    rows = []
    for name, size_bytes, accuracy in zip(pair.names, pair.sizes_bytes, accuracies, strict=True):
        figures = pair.measured.get(name)
        p50_ms, speed = (figures.latency_ms_p50, figures.speedup_vs_reference) if figures else (None, None)
        rows.append(
            {
                "model": named(name, pair.classes),
                "MB": Cell(plain(size_bytes / 1e6)),
                "top-1 %": interval_cell(accuracy, "no labels", scale=100.0),
                "p50 ms": interval_cell(p50_ms, "not measured"),
                f"{TIMES} fp32": interval_cell(speed, "not measured"),
            }
        )
    return rows


def gate_rows(judged: Judgement, limits: Bounds) -> list[Row]:
    """What was judged, what was found, what is allowed."""
    change, agreement = judged.accuracy_change, judged.top1_agreement
    least = f"at least {plain(0.0 - 100 * limits.max_accuracy_drop)}"
    required = f"at least {plain(100 * limits.min_top1_agreement)}"
    relative = "not judged" if judged.is_classes else f"at most {limits.max_relative_error:g}"
    rows = (
        ("change of top-1, points", change and interval_cell(change, scale=100.0), least),
        ("same class as fp32, %", agreement and interval_cell(agreement, scale=100.0), required),
        (f"relative error of {judged.output}", Cell(f"{judged.relative_error:.2g}"), relative),
        ("largest difference", Cell(f"{judged.max_abs_error:.2g}"), "not judged"),
        ("NaN or infinity", Cell(f"{judged.nan + judged.infinite:,}"), "none"),
    )
    return [
        {"gate": Cell(what), "found": found, "allowed": Cell(allowed)}
        for what, found, allowed in rows
        if found
    ]


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
    return rendering.render(
        "pipelines/command_pages/templates/quantize.html",
        title=f"{pair.names[0]} in int8",
        pair=pair,
        classes=pair.classes,
        verdict=verdict_in_words(pair),
        models=model_rows(pair),
        gate=gate_rows(pair.found.judgement, pair.limits),
        how=how_in_words(pair.found),
        facts=facts,
        pictures=pictures,
        tables=tables,
    )
