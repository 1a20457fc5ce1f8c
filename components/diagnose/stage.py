"""Where the time of each engine goes, how near it is to the machine's ceilings, why it is not faster."""

from __future__ import annotations

from hpml.artifacts.ceilings import CeilingsSpec
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.core.contract import Output, Result


def run(
    config: DiagnoseConfig,
    *,
    engines: dict[str, Artifact[EngineSpec]],
    measured: Artifact[MeasurementsSpec],
    data: Artifact[DatasetSpec],
    ceilings: Artifact[CeilingsSpec] | None = None,
    out: Output,
) -> Result[DiagnosisSpec]:
    """Profile each measured engine on test images of `data` and judge it under the roofs of `ceilings`.

    An engine that cannot be diagnosed is in the result with the reason. Without ceilings layers are timed,
    and nothing is said of what would be possible.
    """
    from hpml.components.diagnose.examine import examine

    roofs = ceilings.spec if ceilings else CeilingsSpec(hardware={}, bandwidths=(), gemms=())
    return examine(config, engines, measured.spec, roofs, data, out)
