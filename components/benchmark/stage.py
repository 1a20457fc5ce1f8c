"""Time all engines of a run together: interleaved rounds, each engine in its own process, with intervals."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.core.contract import Output, Result
from hpml.measuring.config import BenchmarkConfig


def run(
    config: BenchmarkConfig,
    *,
    engines: dict[str, Artifact[EngineSpec]],
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[MeasurementsSpec]:
    """Time `engines` on validation rows of `data`.

    What the machine was too busy for is not measured, and the result incomplete; with `require_quiet` it is
    rejected. Rounds that an earlier attempt left in `out.scratch` count. Raises StageFailed that names the
    engine whose process crashed or whose golden outputs it does not reproduce, and ConfigInvalid where the
    reference is not among the engines.
    """
    from hpml.components.benchmark.measure import measure

    return measure(config, engines, data, out)
