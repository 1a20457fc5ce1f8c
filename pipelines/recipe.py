"""The recipe: one YAML file that says what a run is for. Checked whole before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StringConstraints

from components.benchmark.stage import BenchmarkConfig
from components.compress import AnyMethod
from components.contract import Config, ConfigInvalid, validate
from components.deploy.stage import DeployConfig
from components.goals import Goals
from components.prepare.sources import AnySource
from components.register.stage import RegisterConfig
from components.targets import AnyTarget
from components.train.stage import TrainConfig


VariantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]{0,62}$")]


class Recipe(Config):
    """One YAML file that says what a run is for: data, model and training, variants, targets, goals."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")  # the file's name if empty
    data: AnySource
    train: TrainConfig = TrainConfig()
    variants: dict[VariantName, tuple[AnyMethod, ...]] = Field(
        default={"fp32": (), "int8": ("quantize",)}, min_length=1
    )
    targets: tuple[AnyTarget, ...] = Field(default=("onnx",), min_length=1)
    benchmark: BenchmarkConfig = BenchmarkConfig()
    goals: Goals = Goals()
    register: RegisterConfig = RegisterConfig()
    deploy: DeployConfig = DeployConfig()
