"""What can be set about a diagnosis."""

from __future__ import annotations

from pydantic import Field

from hpml.core.contract import Config


class DiagnoseConfig(Config):
    """How the layers are timed, at batch 1."""

    requests: int = Field(default=200, ge=10, le=10_000)  # profiled, of each engine, at most
    seconds: float = Field(default=0.8, gt=0, le=600)  # of profiling an engine, beyond its first 10 requests
    layers: int = Field(default=40, ge=1, le=10_000)  # kept of each engine, the slowest
