"""The page of `hpml diagnose`; its section is the report's."""

from __future__ import annotations

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.report import diagnosis as diagnosing
from hpml.reporting import rendering
from hpml.reporting.colours import colour_classes


def diagnosis_page(title: str, diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> str:
    """The whole HTML document; of a single engine, its layers too."""
    names = list(diagnosis.engines)
    return rendering.render(
        "pipelines/command_pages/templates/diagnosis.html",
        title=title,
        diagnosis=diagnosis,
        measured=peaks,
        chosen=names[0] if len(names) == 1 else None,
        classes=colour_classes(names),
        diagnosing=diagnosing,
    )
