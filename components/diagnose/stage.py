"""Where the time of each engine goes, how near it is to the machine's peaks, why it is not faster."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.core.contract import Output, Result


def run(
    config: DiagnoseConfig,
    *,
    engines: dict[str, Artifact[EngineSpec]],
    measured: Artifact[MeasurementsSpec],
    data: Artifact[DatasetSpec],
    peaks: Artifact[PeaksSpec] | None = None,
    out: Output,
) -> Result[DiagnosisSpec]:
    """Profile each measured engine on validation rows of `data` and judge it under the roofs of `peaks`.

    An engine that cannot be diagnosed is in the result with the reason. Without peaks layers are timed,
    and nothing is said of what would be possible.
    """
    from hpml.components.diagnose.examine import examine

    roofs = peaks.spec if peaks else PeaksSpec(hardware={}, bandwidths=(), gemms=())
    return examine(config, engines, measured.spec, roofs, data, out)
