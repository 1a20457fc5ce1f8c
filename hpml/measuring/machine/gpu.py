"""What NVIDIA's management library says of the GPUs: clocks, power, energy. Silent where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpml.core import nvml

T = TypeVar("T")


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment; None is what this GPU does not tell."""

    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttled: bool | None


def read() -> tuple[GpuState, ...]:
    """Every GPU now; empty without one."""
    with nvml.opened() as library:
        return () if library is None else tuple(_state(library, device) for device in library.devices())


def energy_mj() -> float | None:
    """Millijoules that all GPUs have used since the driver was loaded; None where it cannot be read."""
    with nvml.opened() as library:
        if library is None:
            return None
        used = [_told(library.energy_mj, device) for device in library.devices()]
    return float(sum(used)) if used and None not in used else None  # type: ignore[arg-type]


def memory_bytes(pid: int) -> int | None:
    """Memory of all GPUs that a process has now; None where it cannot be read."""
    with nvml.opened() as library:
        if library is None:
            return None
        of_devices = [_told(library.memory_of_processes, device) or {} for device in library.devices()]
    used = [processes[pid] for processes in of_devices if pid in processes]
    return sum(used) if used else None


def describe(before: tuple[GpuState, ...], after: tuple[GpuState, ...]) -> dict[str, str]:
    """Clocks and power from one reading to the next, in words."""
    return {
        f"gpu {index}": f"SM clock {_words(one.sm_clock_mhz)} to {_words(other.sm_clock_mhz)} "
        f"of {_words(other.max_sm_clock_mhz)} MHz, power {_words(one.power_w)} to {_words(other.power_w)} W, "
        f"{_words(one.temperature_c)} to {_words(other.temperature_c)} °C"
        + (", throttled" if one.throttled or other.throttled else "")
        for index, (one, other) in enumerate(zip(before, after, strict=False))
    }


def _words(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _state(library: nvml.Nvml, device: ctypes.c_void_p) -> GpuState:
    return GpuState(
        sm_clock_mhz=_told(library.sm_clock_mhz, device),
        max_sm_clock_mhz=_told(library.max_sm_clock_mhz, device),
        power_w=_told(library.power_w, device),
        temperature_c=_told(library.temperature_c, device),
        throttled=_told(library.is_slowed, device),
    )


def _told(question: Callable[[ctypes.c_void_p], T], device: ctypes.c_void_p) -> T | None:
    """The answer; None where this GPU, or its driver, has none."""
    try:
        return question(device)
    except nvml.NvmlError:
        return None
