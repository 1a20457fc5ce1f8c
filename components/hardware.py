"""What this machine is: the identity that hardware-bound results carry. Reads /proc, wakes no library."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

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

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # version 1 says "none" with a number near the largest


def usable_cpus() -> int:
    """How many CPUs this process may use: its affinity mask, capped by the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return allowed if quota is None else max(1, min(allowed, quota))


def _cgroup_cpu_quota() -> int | None:
    """How many whole CPUs the control group allows; None without a limit."""
    try:
        limit, period = (_CGROUP / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            limit = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()  # version 1
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) // int(period)


def memory_limit_bytes() -> int | None:
    """The memory that the control group allows; None without a limit."""
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = (_CGROUP / file).read_text().strip()
        except OSError:
            continue
        return int(limit) if limit.isdecimal() and int(limit) < _NO_LIMIT else None
    return None


@cache
def _cpuinfo() -> dict[str, str]:
    fields: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return fields
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields


def cpu_flags() -> tuple[str, ...]:
    """The instruction sets of this CPU that decide which kernels are fast."""
    listed = set((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())
    return tuple(flag for flag in _DECISIVE_FLAGS if flag in listed)


@cache
def gpu_names() -> tuple[str, ...]:
    """The NVIDIA GPUs of this machine, as the driver names them; empty without the driver."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return tuple(names)


def identity() -> dict[str, str]:
    """What a measured or hardware-bound result depends on."""
    cpuinfo = _cpuinfo()
    names = [cpuinfo.get("model name") or platform.machine()]
    names += [f"{key} {cpuinfo[key]}" for key in ("cpu family", "model", "stepping") if key in cpuinfo]
    return {
        "cpu": " ".join(names),
        "cpu_flags": " ".join(cpu_flags()),
        "cpus": str(usable_cpus()),
        "gpus": "; ".join(gpu_names()),
    }
