"""Pages of `hpml bench` and `hpml compare`: figures with their intervals, pictures, what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import TOLERANCE, MeasurementsSpec, OutputComparison
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.report import diagnosis as diagnosing
from hpml.pipelines.command_pages import pictures, tables
from hpml.reporting import rendering
from hpml.reporting.cells import Cell, interval_cell, named
from hpml.reporting.colours import colour_classes
from hpml.reporting.format import TIMES, bounds, plain
from hpml.reporting.over_time import LatencyOverTime

_NAMED = 3  # in a title; more are counted


def bench_page(
    measurements: MeasurementsSpec,
    *,
    facts: Mapping[str, str],
    notes: Sequence[str],
    outputs: Mapping[str, OutputComparison],
    inputs: Sequence[str] = (),
    has_samples: bool = False,
    diagnosed: tuple[DiagnosisSpec, PeaksSpec] | None = None,
    tolerance: float = TOLERANCE,
    over_time: LatencyOverTime | None = None,
) -> str:
    """The whole HTML document of one bench.

    facts: what figures depend on. notes: what to keep in mind. outputs: what each engine answers, the same if
    within `tolerance`. inputs: what the requests held, a line for each input. has_samples: whether that is
    real samples. diagnosed: why the engines are not faster, and under which peaks; None where nobody asked.
    over_time: of the rounds; None where the samples do not say when they were.
    """
    return rendering.render(
        "pipelines/command_pages/templates/bench.html",
        title=_title(measurements),
        measurements=measurements,
        classes=colour_classes(measurements.engines, reference=measurements.reference),
        facts=facts,
        notes=notes,
        outputs=outputs,
        inputs=inputs,
        has_samples=has_samples,
        diagnosed=diagnosed,
        diagnosing=diagnosing,
        tolerance=tolerance,
        seen=over_time,
        pictures=pictures,
        tables=tables,
    )


def _title(measurements: MeasurementsSpec) -> str:
    names = list(measurements.engines)
    if not names:  # a bench that a version before refused
        return "There are no figures"
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} engines"


# ----------------------------------------------------------------------------------------------- a comparison


@dataclass(frozen=True)
class Row:
    """One figure of an engine in two measurements. ratio: above 1 the second is better.

    is_like: whether both are of the same state of the cores, or of the same mixture.
    """

    engine: str
    figure: str
    before: Interval
    after: Interval
    ratio: Interval
    verdict: str  # "faster", "slower", "tied", "undecided"; "not alike"
    is_like: bool = True


def compare_page(
    title: str, rows: Sequence[Row], *, names: tuple[str, str], warnings: Sequence[str], notes: Sequence[str]
) -> str:
    """The whole HTML document of a comparison. names: of the two measurements."""
    classes = colour_classes(dict.fromkeys(row.engine for row in rows))
    shown = [
        {
            "engine": named(row.engine, classes),
            "figure": Cell(row.figure, style=""),
            "before": interval_cell(row.before),
            "after": interval_cell(row.after),
            "ratio": interval_cell(row.ratio),
            "verdict": Cell(row.verdict, style="badge chosen" if row.verdict == "faster" else "badge"),
        }
        for row in rows
    ]
    return rendering.render(
        "pipelines/command_pages/templates/compare.html",
        title=title,
        names=names,
        warned=warnings,
        notes=notes,
        rows=shown,
        ratios={f"{row.engine}, {row.figure}": row.ratio for row in rows},
        classes={f"{row.engine}, {row.figure}": classes[row.engine] for row in rows},
        ratio_picture=pictures.ratio_picture,
    )


def ratio_in_words(ratio: Interval) -> str:
    """A ratio and its interval on one line."""
    return f"{plain(ratio.value)}{TIMES} ({bounds(ratio)})"
