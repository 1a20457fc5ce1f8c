"""Write the deployable bundle and verify it in a clean process without torch."""

from __future__ import annotations

from pydantic import Field

from components.artifacts import Artifact, BundleSpec, EngineSpec, RegistrationSpec
from components.contract import Config, Output, Result


class DeployConfig(Config):
    """How closely the bundle has to reproduce the golden outputs."""

    tolerance: float = Field(default=1e-3, gt=0, le=1)  # largest absolute difference of a logit


def run(
    config: DeployConfig,
    *,
    engine: Artifact[EngineSpec],
    version: Artifact[RegistrationSpec],
    out: Output,
) -> Result[BundleSpec]:
    raise NotImplementedError
