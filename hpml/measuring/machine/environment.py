"""What a figure depends on beside the engine: the machine, its limits, its load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpml.core import cgroup, hardware
from hpml.targets import TARGETS

_PRESSURE = "/proc/pressure/cpu"  # absent from kernels without pressure stall information
LIBRARIES = ("numpy", *(library for target in TARGETS.values() for library in target.libraries))


@dataclass(frozen=True)
class Pressure:
    """How long some task had to wait for a CPU since boot (Linux pressure stall information), and when."""

    stalled_s: float
    at_s: float

    @classmethod
    def read(cls) -> Pressure | None:
        """The pressure now; None where the kernel does not tell."""
        try:
            some = Path(_PRESSURE).read_text().splitlines()[0]
        except OSError:
            return None
        fields = dict(field.split("=") for field in some.split()[1:])
        return cls(stalled_s=int(fields["total"]) / 1e6, at_s=time.monotonic())

    def share_since(self, earlier: Pressure) -> float:
        """The share of the time since `earlier` in which some task waited."""
        return (self.stalled_s - earlier.stalled_s) / max(self.at_s - earlier.at_s, 1e-9)


def describe() -> dict[str, str]:
    """The machine, its limits, the libraries that run engines, and the load, in words."""
    limit = cgroup.memory_limit_bytes()
    return {
        **hardware.identity(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not known",
        "cpus_of_the_affinity_mask": ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))),
        "memory_limit": f"{limit / 1e9:.1f} GB" if limit else "none",
        **versions(LIBRARIES),
        "load_average_1_min": f"{os.getloadavg()[0]:.2f}",
        "cpu_pressure_10_s_before": _read(_PRESSURE).partition(" avg60")[0] or "not known",
    }


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Those of the libraries that are installed."""
    found = {}
    for library in libraries:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
