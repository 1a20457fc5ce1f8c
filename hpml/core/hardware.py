"""What this machine is: the identity that hardware-bound results carry. Imports no library."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpml.core import cgroup, nvml

_CPUS = Path("/sys/devices/system/cpu")
_PROC_NVIDIA = Path("/proc/driver/nvidia")

# Instruction sets that change which kernels the runtimes choose, as Linux spells them.
_DECISIVE_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)


def usable_cpus() -> int:
    """How many CPUs this process may use: its affinity mask, capped by the control group's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_cores() -> int:
    """The physical cores behind `usable_cpus`: two CPUs that share one count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = _CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return min(len(cores), usable_cpus())


@cache
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first CPU."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu_flags() -> tuple[str, ...]:
    """The instruction sets of this CPU that decide which kernels are fast."""
    listed = set((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())
    return tuple(flag for flag in _DECISIVE_FLAGS if flag in listed)


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, as its driver describes it. Where NVML is out of reach only the name is known."""

    name: str
    compute_capability: str = ""
    memory_mib: int = 0

    def __str__(self) -> str:
        if not self.compute_capability:
            return self.name
        return f"{self.name}, compute capability {self.compute_capability}, {self.memory_mib} MiB"


@dataclass(frozen=True)
class Gpus:
    """The NVIDIA GPUs of this machine and the version of their driver; nothing and "" without one."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""


@cache
def _gpus() -> Gpus:
    with nvml.opened() as library, suppress(nvml.NvmlError):
        if library:
            found = tuple(_gpu(library, device) for device in library.devices())
            return Gpus(found, library.driver()) if found else Gpus()
    return _gpus_of_proc()


def _gpu(library: nvml.Nvml, device: ctypes.c_void_p) -> Gpu:
    major, minor = library.compute_capability(device)
    return Gpu(library.name(device), f"{major}.{minor}", library.memory_bytes(device) // 2**20)


def _gpus_of_proc() -> Gpus:
    """What the kernel module says, for a container that has the driver's devices but not its libraries."""
    names = []
    for file in sorted(_PROC_NVIDIA.glob("gpus/*/information")):
        names += re.findall(r"^Model:\s*(.*\S)", file.read_text(), re.MULTILINE)
    if not names:
        return Gpus()
    version = re.search(r"Kernel Module\D*(\d[\d.]*)", (_PROC_NVIDIA / "version").read_text())
    return Gpus(tuple(Gpu(name) for name in names), version.group(1) if version else "")


def gpu_names() -> tuple[str, ...]:
    """The NVIDIA GPUs of this machine, as the driver names them; empty without the driver."""
    return tuple(gpu.name for gpu in _gpus().gpus)


def gpu_driver() -> str:
    """The version of NVIDIA's driver; empty without a GPU."""
    return _gpus().driver


def identity() -> dict[str, str]:
    """What a measured or hardware-bound result depends on."""
    cpuinfo = _cpuinfo()
    names = [cpuinfo.get("model name") or platform.machine()]
    names += [f"{key} {cpuinfo[key]}" for key in ("cpu family", "model", "stepping") if key in cpuinfo]
    return {
        "cpu": " ".join(names),
        "cpu_flags": " ".join(cpu_flags()),
        "cpus": str(usable_cpus()),
        "gpus": "; ".join(str(gpu) for gpu in _gpus().gpus),
        "gpu_driver": gpu_driver(),
    }


def products_saturate() -> bool:
    """Whether this CPU adds pairs of uint8 x int8 products in 16 bits, where large weights overflow."""
    flags = cpu_flags()
    return "avx2" in flags and not {"avx512_vnni", "avx_vnni"} & set(flags)
