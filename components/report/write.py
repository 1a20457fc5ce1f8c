"""Write the report."""

from __future__ import annotations

from collections.abc import Mapping

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.model import ModelSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.artifacts.report import ReportSpec
from hpml.components.report.content import gather
from hpml.components.report.data_files import figures_csv, figures_json
from hpml.components.report.page import page, title_of
from hpml.core.contract import Output, Result
from hpml.measuring.goals import Goals


def write_report(
    goals: Goals,
    measured: Artifact[MeasurementsSpec],
    engines: Mapping[str, Artifact[EngineSpec]],
    models: Mapping[str, Artifact[ModelSpec]],
    data: Artifact[DatasetSpec],
    peaks: Artifact[PeaksSpec] | None,
    diagnosis: Artifact[DiagnosisSpec] | None,
    out: Output,
) -> Result[ReportSpec]:
    """Write `report.html`, `figures.json` and `figures.csv`; see `hpml.components.report.stage.run`."""
    content = gather(
        goals, measured, engines, models, data, peaks=peaks, diagnosis=diagnosis, left_out=out.left_out
    )
    for name, text in (
        ("report.html", page(content, tell=out.note)),
        ("figures.json", figures_json(content)),
        ("figures.csv", figures_csv(content)),
    ):
        (out.path / name).write_text(text, encoding="utf-8", newline="")
    return Result(ReportSpec(title=title_of(content)))
