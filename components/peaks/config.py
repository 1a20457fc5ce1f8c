"""What is measured of the machine, and when it is stable enough."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpml.core.contract import Config
from hpml.core.hardware import usable_cpus

Threads = Annotated[int, Field(ge=1, le=1024)]


GemmSize = Annotated[int, Field(ge=32, le=32_768, multiple_of=8)]  # int8 on a GPU wants whole eights


class PeaksConfig(Config):
    """What is measured, and when a figure is stable enough to be quoted. The defaults take about 15 s."""

    threads: tuple[Threads, ...] | None = Field(default=None, min_length=1)  # null: 1, and all of the step
    gemm_sizes: tuple[GemmSize, ...] = (64, 128, 256, 512, 1024, 2048)
    gpu_gemm_sizes: tuple[GemmSize, ...] = (256, 1024, 4096, 8192)
    rounds: int = Field(default=7, ge=5, le=1000)  # in each, every point is measured once, in random order
    max_spread: float = Field(default=0.10, gt=0, le=10)  # of the rounds; beyond it, a point is not quoted
    time_budget_s: float = Field(default=15.0, gt=0)  # no new round after it, once 5 are done
    seed: int = Field(default=0, ge=0)  # of the order of the points

    def unsupported_reason(self) -> str:
        """Why this machine cannot run so many threads side by side; empty if it can."""
        most = max(self.threads or (1,))
        if most > usable_cpus():
            return f"peaks.threads has {most}, this machine has {usable_cpus()} CPUs to use"
        return ""
