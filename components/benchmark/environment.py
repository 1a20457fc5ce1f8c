"""What a figure depends on beside the engine: the machine, its limits, its load."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from components import hardware


@dataclass(frozen=True)
class Pressure:
    """How long some task had to wait for a CPU since boot (Linux pressure stall information), and when."""

    stalled_s: float
    at_s: float

    @classmethod
    def read(cls) -> Pressure | None:
        """The pressure now; None where the kernel does not tell."""
        try:
            some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        except OSError:
            return None
        fields = dict(field.split("=") for field in some.split()[1:])
        return cls(stalled_s=int(fields["total"]) / 1e6, at_s=time.monotonic())

    def share_since(self, earlier: Pressure) -> float:
        """The share of the time since `earlier` in which some task waited."""
        return (self.stalled_s - earlier.stalled_s) / max(self.at_s - earlier.at_s, 1e-9)


def describe() -> dict[str, str]:
    """The machine, its limits and its load, in words."""
    return {
        **hardware.identity(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not known",
        "memory_limit": _read("/sys/fs/cgroup/memory.max") or "not known",
        "load_average_1_min": f"{os.getloadavg()[0]:.2f}",
        "cpu_pressure_10_s_before": _read("/proc/pressure/cpu").partition(" avg60")[0] or "not known",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
