"""What can be set about a bundle."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.core.contract import Config


class BundleConfig(Config):
    """How closely the bundle has to reproduce the golden outputs, and how it is served."""

    tolerance: float = Field(default=1e-3, gt=0, le=1)  # largest absolute difference of a logit
    max_batch: int = Field(default=64, ge=1, le=4096)  # the largest batch that a server may form
    serve_versions: Literal["all", "latest"] = "all"  # of the versions in a model repository, by Triton
