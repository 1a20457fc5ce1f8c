"""The driver's library, as ctypes would call it: two GPUs, of which the second tells only what it must."""

from __future__ import annotations

import ctypes
from typing import Any

NOT_SUPPORTED, LIBRARY_AND_DRIVER_DIFFER = 3, 18


class FakeNvml:
    """Answers like libnvidia-ml.so.1: error codes, and values through pointers (`byref`) and buffers."""

    def __init__(self, *, driver: str = "570.86.15", init: int = 0) -> None:
        self.driver, self.init = driver, init
        self.opened = 0

    def __call__(self, name: str) -> FakeNvml:
        """Stands for ctypes.CDLL."""
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:
        self.opened += not self.init
        return self.init

    def nvmlShutdown(self) -> int:
        self.opened -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: int) -> int:
        buffer.value = self.driver.encode()[: size - 1]
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 0x7F0000000000 + index  # needs 64 bits
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, buffer: Any, size: int) -> int:
        buffer.value = (b"NVIDIA H200", b"NVIDIA T500")[self._index(device)]
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = ((9, 0), (7, 5))[self._index(device)]
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total = (143_771, 4_096)[self._index(device)] * 2**20
        return 0

    def nvmlDeviceGetClockInfo(self, device: ctypes.c_void_p, clock: int, mhz: Any) -> int:
        assert clock == 1
        mhz._obj.value = 1410
        return 0

    def nvmlDeviceGetMaxClockInfo(self, device: ctypes.c_void_p, clock: int, mhz: Any) -> int:
        mhz._obj.value = 1980
        return 0

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, milliwatts: Any) -> int:
        return self._told(device, milliwatts, 650_400)

    def nvmlDeviceGetTemperature(self, device: ctypes.c_void_p, sensor: int, degrees: Any) -> int:
        degrees._obj.value = 61
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: ctypes.c_void_p, reasons: Any) -> int:
        return self._told(device, reasons, 0x20 | 0x01)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, millijoules: Any) -> int:
        return self._told(device, millijoules, 5_000_000_000)  # more than 32 bits

    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, device: ctypes.c_void_p, count: Any, processes: Any
    ) -> int:
        assert count._obj.value == len(processes)
        count._obj.value = 2
        processes[0].pid, processes[0].used_bytes = 4711, 3 * 2**30
        processes[1].pid, processes[1].used_bytes = 4712, 2**64 - 1
        return 0

    def _index(self, device: ctypes.c_void_p) -> int:
        assert device.value is not None
        return device.value - 0x7F0000000000

    def _told(self, device: ctypes.c_void_p, answer: Any, value: int) -> int:
        if self._index(device):
            return NOT_SUPPORTED
        answer._obj.value = value
        return 0
