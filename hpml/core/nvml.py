"""NVIDIA's management library (NVML), as far as we need it. It comes with the driver: no package is needed.

Its C functions are called by ctypes: each returns an error code, and answers through its last arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96  # NVML's largest buffer of a name or a version
_MOST_PROCESSES = 1024

CLOCK_SM = 1
TEMPERATURE_GPU = 0
SLOWED = 0x08 | 0x20  # by the hardware (heat, power brake), or by the driver because of heat


class NvmlError(Exception):
    """What a function of NVML refused; most often this GPU or driver has no such counter."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of version 2 and 3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@contextmanager
def opened() -> Iterator[Nvml | None]:
    """NVML while it is entered; None where there is no driver, or none that runs."""
    try:
        library = Nvml(ctypes.CDLL(_LIBRARY))
        library.call("nvmlInit_v2")
    except (OSError, NvmlError):
        yield None
        return
    try:
        yield library
    finally:
        library.call("nvmlShutdown")


class Nvml:
    """The functions of NVML that we use. Raises NvmlError where one has no answer that we need."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function by its name in nvml.h."""
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"{function} is not in this driver's NVML") from None
        if code:
            raise NvmlError(f"{function} returned {code}")

    def driver(self) -> str:
        """The version of the driver, such as "570.86.15"."""
        return self._text("nvmlSystemGetDriverVersion")

    def devices(self) -> list[ctypes.c_void_p]:
        """A handle of every GPU that this process may see, in the order of the PCI bus."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        for index, handle in enumerate(handles):
            self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return handles

    def name(self, device: ctypes.c_void_p) -> str:
        """Such as "NVIDIA H200"."""
        return self._text("nvmlDeviceGetName", device)

    def compute_capability(self, device: ctypes.c_void_p) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def memory_bytes(self, device: ctypes.c_void_p) -> int:
        """All that the GPU has."""
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return int(memory.total)

    def memory_of_processes(self, device: ctypes.c_void_p) -> dict[int, int]:
        """Bytes by process id (of the host), of those that compute; empty where that is not told."""
        count = ctypes.c_uint(_MOST_PROCESSES)
        processes = (_Process * _MOST_PROCESSES)()
        try:
            self.call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), processes)
        except NvmlError:
            return {}
        unknown = ctypes.c_ulonglong(-1).value  # where Windows manages the memory, as under WSL
        found = {process.pid: process.used_bytes for process in processes[: count.value]}
        return {pid: used_bytes for pid, used_bytes in found.items() if used_bytes != unknown}

    def number(self, function: str, device: ctypes.c_void_p, *arguments: Any, of: Any = ctypes.c_uint) -> Any:
        """What a function answers of a GPU, as the C type `of`; None where it has no such counter."""
        answer = of()
        try:
            self.call(function, device, *arguments, ctypes.byref(answer))
        except NvmlError:
            return None
        return int(answer.value)

    def _text(self, function: str, *arguments: Any) -> str:
        answer = ctypes.create_string_buffer(_NAME_BYTES)
        self.call(function, *arguments, answer, _NAME_BYTES)
        return answer.value.decode(errors="replace")
