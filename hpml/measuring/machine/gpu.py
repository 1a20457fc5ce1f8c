"""What NVIDIA's management library says of the GPUs: clocks, power, energy. Silent where there is none."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from hpml.core import nvml


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
        counter = "nvmlDeviceGetTotalEnergyConsumption"  # of GPUs from Volta on
        used = [library.number(counter, device, of=ctypes.c_ulonglong) for device in library.devices()]
    return float(sum(used)) if used and None not in used else None


def memory_bytes(pid: int) -> int | None:
    """Memory of all GPUs that a process has now; None where it cannot be read."""
    with nvml.opened() as library:
        if library is None:
            return None
        of_devices = [library.memory_of_processes(device) for device in library.devices()]
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
    power_mw = library.number("nvmlDeviceGetPowerUsage", device)
    slowed_by = library.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, of=ctypes.c_ulonglong)
    return GpuState(
        sm_clock_mhz=library.number("nvmlDeviceGetClockInfo", device, nvml.CLOCK_SM),
        max_sm_clock_mhz=library.number("nvmlDeviceGetMaxClockInfo", device, nvml.CLOCK_SM),
        power_w=None if power_mw is None else power_mw / 1000,
        temperature_c=library.number("nvmlDeviceGetTemperature", device, nvml.TEMPERATURE_GPU),
        throttled=None if slowed_by is None else bool(slowed_by & nvml.SLOWED),
    )
