"""Write the deployable bundle and verify it in a clean process without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.artifacts import Artifact, BundleSpec, EngineSpec, RegistrationSpec
from components.contract import Config, Output, Result


class DeployConfig(Config):
    """How closely the bundle has to reproduce the golden outputs, and how it is served."""

    tolerance: float = Field(default=1e-3, gt=0, le=1)  # largest absolute difference of a logit
    max_batch: int = Field(default=64, ge=1, le=4096)  # the largest batch that a server may form
    serve_versions: Literal["all", "latest"] = "all"  # of the versions in a model repository, by Triton


def run(
    config: DeployConfig,
    *,
    engine: Artifact[EngineSpec],
    version: Artifact[RegistrationSpec],
    out: Output,
) -> Result[BundleSpec]:
    """Write the bundle of `engine`, as select wrote it and register registered it as `version`.

    That of an engine that is not verified says so, and is placed on a server with --unverified only.
    Raises StageFailed if `version` is that of another engine, and GateFailed if the bundle does not answer
    its golden images as the engine did when it was exported.
    """
    from components.deploy.bundle import write_bundle

    return write_bundle(config, engine, version, out)
