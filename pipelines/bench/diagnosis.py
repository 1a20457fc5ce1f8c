"""`hpml diagnose`: why the engines of a run are not faster, from the artifact of its step `diagnose`."""

from __future__ import annotations

import difflib
import json
import textwrap
from pathlib import Path

from rich.text import Text

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, LayerFigures
from hpml.artifacts.peaks import PeaksSpec
from hpml.core.errors import UsageError
from hpml.pipelines.engine.run_record import FINISHED, RunRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.terminal import console
from hpml.reporting.format import plain, shorten

_WIDTH = 80
_LAYERS = 12  # in the table of the slowest
_NAME_WIDTH = 26


def find(home: Path, record: RunRecord) -> DiagnosisSpec:
    """The diagnosis of a run.

    Raises UsageError if the run has none, saying how its step ended.
    """
    for step in record.steps.values():
        if step.stage != "diagnose":
            continue
        if step.status not in FINISHED:
            raise UsageError(
                f"run {record.id} has no diagnosis",
                why=f"its step diagnose is {step.status}{f': {step.error}' if step.error else ''}",
                fix="hpml status shows the steps of a run",
            )
        store = Store(home)
        with store.in_use():
            spec: DiagnosisSpec = store.open(step.digest).spec
        return spec
    raise UsageError(
        f"run {record.id} has no diagnosis",
        why="it has no step diagnose",
        fix="run its recipe again with this version of hpml",
    )


def peaks_of(home: Path, record: RunRecord) -> PeaksSpec:
    """The peaks that the diagnosis of a run is under; none where they could not be measured."""
    for step in record.steps.values():
        if step.stage in ("peaks", "ceilings") and step.digest:
            spec: PeaksSpec = Store(home).open(step.digest).spec
            return spec
    return PeaksSpec(hardware={}, bandwidths=(), gemms=())


def show_document(title: str, diagnosis: DiagnosisSpec, peaks: PeaksSpec, variant: str, output: str) -> None:
    """Print the diagnosis, or that of the engine `variant`, as "markdown" or "html"."""
    from hpml.pipelines.command_pages.diagnosis import diagnosis_page
    from hpml.reporting.diagnosis import diagnosis_markdown

    if variant:
        require_engine(diagnosis, variant)
        engines = {variant: diagnosis.engines[variant]}
        diagnosis = diagnosis.model_copy(update={"engines": engines})
    is_text = output == "markdown"
    print(diagnosis_markdown(diagnosis) if is_text else diagnosis_page(variant or title, diagnosis, peaks))


def show(diagnosis: DiagnosisSpec, variant: str, output: str) -> None:
    """Print the diagnosis of the engine `variant`, or where it is empty what to do about each engine.

    Raises UsageError if there is no such engine, with the nearest names.
    """
    if variant:
        require_engine(diagnosis, variant)
    if output == "json":
        chosen = diagnosis.engines[variant] if variant else diagnosis
        print(json.dumps(chosen.model_dump(mode="json"), indent=2))
    elif variant:
        one = diagnosis.engines[variant]
        _show_engine(variant, one, one.threads or diagnosis.threads)
        _show_notes(diagnosis)
    else:
        for name, one in diagnosis.engines.items():
            _say(f"{name}: {_first_sentence(one)}", hang=2)
            for remedy in dict.fromkeys(finding.remedy for finding in one.findings if finding.remedy):
                _say(f"  -> {remedy}", hang=5)
        _show_notes(diagnosis)


def require_engine(diagnosis: DiagnosisSpec, variant: str) -> None:
    """Raise UsageError with the nearest names if there is no such engine."""
    if variant not in diagnosis.engines:
        known = list(diagnosis.engines)
        near = difflib.get_close_matches(variant, known, n=3, cutoff=0.4)
        raise UsageError(
            f"the run has no engine {variant!r}",
            why=f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}",
        )


def _show_notes(diagnosis: DiagnosisSpec) -> None:
    for note in diagnosis.notes:
        _say(f"note: {note}", hang=2)


def _first_sentence(one: EngineDiagnosis) -> str:
    if one.status == "not diagnosed":
        return f"not diagnosed, {one.reason}"
    sentence, _, _ = one.verdict.partition(". ")
    return sentence.removesuffix(".")


def _show_engine(name: str, one: EngineDiagnosis, threads: int) -> None:
    if one.status == "not diagnosed":
        _say(f"{name} was not diagnosed: {one.reason}")
        return
    console.out.print(Text(name, style="bold"), soft_wrap=True)
    _say(one.verdict)
    share = "An unknown share" if one.share_of_roof is None else f"{100 * one.share_of_roof:.0f} %"
    peak = f"the peak with {_plural(threads, 'thread')}" if one.device == "cpu" else "the GPU's peak"
    _say(
        f"{share} of {peak} at batch {one.batch}: "
        f"{plain(one.flops / 1e6)} million operations and {plain(one.bytes / 1e6)} MB in "
        f"{plain(one.time_us / 1e3)} ms"
    )
    for finding in one.findings:
        console.out.print()
        _say(f"* {finding.sentence}", hang=2)
        if finding.remedy:
            _say(f"  -> {finding.remedy}", hang=5)
    if one.layers:
        console.out.print()
        _show_layers(one)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _show_layers(one: EngineDiagnosis) -> None:
    slowest = sorted(one.layers, key=lambda layer: -layer.time_us)[:_LAYERS]
    columns = ("slowest layers", "operation", "us", "%", "bound by", "% of peak")
    console.print_table(columns, [_cells(layer, one.profiled_us) for layer in slowest], right=(2, 3, 5))
    console.out.print(Text("us: in the profile. %: of all layers.", style="dim"))


def _cells(layer: LayerFigures, profiled_us: float) -> tuple[str, ...]:
    share = layer.share_of_roof
    return (
        shorten(layer.name, _NAME_WIDTH),
        layer.op.removeprefix("aten::")[:18],
        plain(layer.time_us) if layer.time_us else "< 1",
        f"{100 * layer.time_us / profiled_us:.0f}" if profiled_us else "-",
        layer.bound or "-",
        "-" if share is None else f"{100 * share:.0f}",
    )


def _say(text: str, *, hang: int = 0) -> None:
    """`text` wrapped at 80 columns; `hang` is the indent of all lines but the first."""
    for line in textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False
    ):
        console.out.print(Text(line), soft_wrap=True)
