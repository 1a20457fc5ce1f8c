"""Write the report."""

from __future__ import annotations

from collections.abc import Mapping

from components.artifacts import Artifact, DatasetSpec, EngineSpec, ModelSpec, ReportSpec
from components.contract import Output, Result
from components.goals import Goals
from components.measurements import CeilingsSpec, DiagnosisSpec, MeasurementsSpec
from components.report.content import gather
from components.report.page import page, title_of
from components.report.tables import figures_csv, figures_json


def write_report(
    goals: Goals,
    measured: Artifact[MeasurementsSpec],
    engines: Mapping[str, Artifact[EngineSpec]],
    models: Mapping[str, Artifact[ModelSpec]],
    data: Artifact[DatasetSpec],
    ceilings: Artifact[CeilingsSpec] | None,
    diagnosis: Artifact[DiagnosisSpec] | None,
    out: Output,
) -> Result[ReportSpec]:
    """Write `report.html`, `figures.json` and `figures.csv`; see `components.report.stage.run`."""
    content = gather(
        goals, measured, engines, models, data, ceilings=ceilings, diagnosis=diagnosis, left_out=out.left_out
    )
    for name, text in (
        ("report.html", page(content, tell=out.note)),
        ("figures.json", figures_json(content)),
        ("figures.csv", figures_csv(content)),
    ):
        (out.path / name).write_text(text, encoding="utf-8", newline="")
    return Result(ReportSpec(title=title_of(content)))
