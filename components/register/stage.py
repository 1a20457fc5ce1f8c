"""Register the chosen engine in the MLflow model registry."""

from __future__ import annotations

from pydantic import Field

from components.artifacts import Artifact, EngineSpec, MeasurementsSpec, RegistrationSpec
from components.contract import Config, Output, Result


class RegisterConfig(Config):
    """How the chosen engine is registered."""

    model_name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")  # the recipe's name if empty
    tags: dict[str, str] = Field(default_factory=dict)  # added to the version, such as {"team": "vision"}


def run(
    config: RegisterConfig,
    *,
    engine: Artifact[EngineSpec],
    measured: Artifact[MeasurementsSpec],
    out: Output,
) -> Result[RegistrationSpec]:
    raise NotImplementedError
