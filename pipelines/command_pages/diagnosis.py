"""A diagnosis as a page of its own; the section is the report's."""

from __future__ import annotations

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.report.sections.diagnosis import diagnosis_section
from hpml.reporting.colours import colour_classes
from hpml.reporting.elements import breakable, document
from hpml.reporting.markup import node


def diagnosis_page(title: str, diagnosis: DiagnosisSpec, peaks: PeaksSpec) -> str:
    """The whole HTML document; of a single engine, its layers too."""
    names = list(diagnosis.engines)
    chosen = names[0] if len(names) == 1 else None
    classes = colour_classes(names, reference="")
    return document(
        title,
        node("header", node("p", "hpml diagnose", class_="eyebrow"), node("h1", breakable(title))),
        diagnosis_section(diagnosis, peaks, classes, chosen),
    )
