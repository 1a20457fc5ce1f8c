"""A diagnosis as a page of its own; the section is the report's."""

from __future__ import annotations

from components.measurements import CeilingsSpec, DiagnosisSpec
from components.page.colours import colour_classes
from components.page.elements import breakable, document
from components.page.markup import node
from components.report.sections.diagnosis import diagnosis_section


def diagnosis_page(title: str, diagnosis: DiagnosisSpec, ceilings: CeilingsSpec) -> str:
    """The whole HTML document; of a single engine, its layers too."""
    names = list(diagnosis.engines)
    chosen = names[0] if len(names) == 1 else None
    classes = colour_classes(names, reference="")
    return document(
        title,
        node("header", node("p", "hpml diagnose", class_="eyebrow"), node("h1", breakable(title))),
        diagnosis_section(diagnosis, ceilings, classes, chosen),
    )
