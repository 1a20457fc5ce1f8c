"""Where the time of each engine goes, how near it is to the machine's ceilings, why it is not faster."""

from __future__ import annotations

from pydantic import Field

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.contract import Config, Output, Result
from components.measurements import CeilingsSpec, DiagnosisSpec, MeasurementsSpec


class DiagnoseConfig(Config):
    """How the layers are timed, at batch 1."""

    requests: int = Field(default=200, ge=10, le=10_000)  # profiled, of each engine, at most
    seconds: float = Field(default=0.8, gt=0, le=600)  # of profiling an engine, beyond its first 10 requests
    layers: int = Field(default=40, ge=1, le=10_000)  # kept of each engine, the slowest


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
    from components.diagnose.examine import examine

    roofs = ceilings.spec if ceilings else CeilingsSpec(hardware={}, bandwidths=(), gemms=())
    return examine(config, engines, measured.spec, roofs, data, out)
