"""Show what the run found: one HTML page with pictures, and the figures as JSON and CSV."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.model import ModelSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.artifacts.report import ReportSpec
from hpml.core.contract import Output, Result
from hpml.measuring.goals import Goals


def run(
    config: Goals,
    *,
    measured: Artifact[MeasurementsSpec],
    engines: dict[str, Artifact[EngineSpec]],
    models: dict[str, Artifact[ModelSpec]],
    data: Artifact[DatasetSpec],
    peaks: Artifact[PeaksSpec] | None = None,
    diagnosis: Artifact[DiagnosisSpec] | None = None,
    evaluation: Artifact[EvaluationSpec] | None = None,
    out: Output,
) -> Result[ReportSpec]:
    """Write `report.html`, `figures.json` and `figures.csv`.

    engines: named "variant/target". models: what each method made, named "variant method", and "base". What
    is missing, and a part that cannot be drawn, is left out with a note in its place.
    """
    from hpml.components.report.content import gather
    from hpml.components.report.data_files import figures_csv, figures_json
    from hpml.components.report.page import page, title_of

    content = gather(
        config, measured, engines, models, data, peaks, diagnosis, evaluation, left_out=out.left_out
    )
    for name, text in (
        ("report.html", page(content, tell=out.note)),
        ("figures.json", figures_json(content)),
        ("figures.csv", figures_csv(content)),
    ):
        (out.path / name).write_text(text, encoding="utf-8", newline="")
    return Result(ReportSpec(title=title_of(content)))
