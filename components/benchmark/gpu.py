"""What NVIDIA's management library says of the GPUs: clocks, power, energy. Silent where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from components import hardware


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment."""

    sm_clock_mhz: int
    max_sm_clock_mhz: int
    power_w: float
    temperature_c: int
    throttled: bool


def read() -> tuple[GpuState, ...]:
    """Every GPU now; empty without one, or without nvidia-ml-py."""
    with _library() as nvml:
        if nvml is None:
            return ()
        return tuple(_state(nvml, handle) for handle in _handles(nvml))


def energy_mj() -> float | None:
    """Millijoules that all GPUs have used since the driver was loaded; None where it cannot be read."""
    with _library() as nvml:
        if nvml is None:
            return None
        try:
            return float(sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in _handles(nvml)))
        except nvml.NVMLError:  # before Volta there is no such counter
            return None


def memory_bytes(pid: int) -> int | None:
    """Memory of all GPUs that a process has now; None where it cannot be read."""
    with _library() as nvml:
        if nvml is None:
            return None
        processes = [
            process
            for handle in _handles(nvml)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    used = [process.usedGpuMemory for process in processes if process.pid == pid]
    return sum(used) if used and None not in used else None


def describe(before: tuple[GpuState, ...], after: tuple[GpuState, ...]) -> dict[str, str]:
    """Clocks and power from one reading to the next, in words."""
    return {
        f"gpu {index}": f"SM clock {one.sm_clock_mhz} to {other.sm_clock_mhz} "
        f"of {other.max_sm_clock_mhz} MHz, power {one.power_w:.0f} to {other.power_w:.0f} W, "
        f"{one.temperature_c} to {other.temperature_c} °C"
        + (", throttled" if one.throttled or other.throttled else "")
        for index, (one, other) in enumerate(zip(before, after, strict=False))
    }


@contextmanager
def _library() -> Iterator[Any]:
    """NVML, started; None where there is no GPU or no binding."""
    if not hardware.gpu_names():
        yield None
        return
    try:
        import pynvml
    except ModuleNotFoundError:
        yield None
        return
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _state(nvml: Any, handle: Any) -> GpuState:
    slowed = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
    return GpuState(
        sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        throttled=bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slowed),
    )
