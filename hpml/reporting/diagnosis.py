"""A diagnosis in Markdown."""

from __future__ import annotations

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis
from hpml.reporting.format import ABSENT, plain

_LAYERS = 12  # in the table of the slowest


def diagnosis_markdown(diagnosis: DiagnosisSpec) -> str:
    """Every engine: its verdict, its findings with their remedies, and its slowest layers."""
    parts = []
    for name, one in diagnosis.engines.items():
        parts.append(f"## {_plain_text(name)}")
        if one.status == "not diagnosed":
            parts.append(f"Not diagnosed: {_plain_text(one.reason)}")
            continue
        parts.append(_plain_text(one.verdict))
        parts += [
            f"* {_plain_text(finding.sentence)}" + (f" -> {finding.remedy}" if finding.remedy else "")
            for finding in one.findings
        ]
        parts.append(_layers(one))
    parts += [f"Note: {_plain_text(note)}" for note in diagnosis.notes]
    return "\n\n".join(parts)


def _layers(one: EngineDiagnosis) -> str:
    rows = [
        (
            _plain_text(layer.name),
            layer.op,
            plain(layer.time_us),
            plain(100 * layer.time_us / one.profiled_us) if one.profiled_us else ABSENT,
            layer.bound or ABSENT,
            ABSENT if layer.share_of_roof is None else plain(100 * layer.share_of_roof, significant=2),
        )
        for layer in sorted(one.layers, key=lambda layer: -layer.time_us)[:_LAYERS]
    ]
    columns = ("slowest layers", "operation", "us", "%", "bound by", "% of peak")
    lines = [columns, ("---", "---", "--:", "--:", "---", "--:"), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain_text(text: str) -> str:
    """Without what Markdown takes for markup or for the end of a cell: names come from files of others."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in " ".join(text.split()))
