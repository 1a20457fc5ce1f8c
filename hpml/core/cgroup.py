"""What this process's control group allows it and has counted, in version 1 and 2 of the kernel's interface.

A limit of any group above holds, too: a systemd slice, a pod, a container. In a container the group's path is
that of the host, and its own files are mounted at the root; both places are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62  # version 1 says "none" with a number near the largest

T = TypeVar("T")


def cpu_quota() -> float | None:
    """How many CPUs' time the groups allow; None without a limit."""
    return min(_read("cpu", _quota_of), default=None)


def throttled_s() -> float:
    """For how many seconds a CPU limit has stopped the groups; 0 where there is none."""
    return sum(_read("cpu", _throttled_of))


def memory_limit_bytes() -> int | None:
    """The memory that the groups allow; None without a limit."""
    return min((limit for limit, _ in _read("memory", _memory_of)), default=None)


def memory_left_bytes() -> int | None:
    """The memory that the groups would still give; None without a limit."""
    return min((max(0, limit - used) for limit, used in _read("memory", _memory_of)), default=None)


def oom_kills() -> int | None:
    """How many processes of the innermost group the kernel has killed for lack of memory; None if unknown."""
    return next(_read("memory", _oom_kills_of), None)


def _read(controller: str, read: Callable[[Path], T | None]) -> Iterator[T]:
    """What `read` finds in the folders of our group and of those above it, the innermost first."""
    for folder in _folders(controller):
        with suppress(OSError, ValueError, KeyError):
            value = read(folder)
            if value is not None:
                yield value


def _folders(controller: str) -> Iterator[Path]:
    """Where the files of our group and of those above it may be, the innermost first."""
    paths = {"": PurePosixPath("/"), controller: PurePosixPath("/")}
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                paths[name] = PurePosixPath(path)
    for mount, own in ((_MOUNT, paths[""]), (_MOUNT / controller, paths[controller])):
        for group in (own, *own.parents):
            yield mount / group.relative_to("/")


def _numbers(file: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in file.read_text().splitlines())}


def _quota_of(folder: Path) -> float | None:
    if (folder / "cpu.max").exists():
        limit, period = (folder / "cpu.max").read_text().split()
    else:
        limit = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    return None if limit in ("max", "-1") else int(limit) / int(period)


def _throttled_of(folder: Path) -> float:
    counted = _numbers(folder / "cpu.stat")
    return counted["throttled_usec"] / 1e6 if "throttled_usec" in counted else counted["throttled_time"] / 1e9


def _memory_of(folder: Path) -> tuple[int, int] | None:
    limit, used = ("memory.max", "memory.current")
    if not (folder / limit).exists():
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    allowed = (folder / limit).read_text().strip()
    if allowed == "max" or int(allowed) >= _NO_LIMIT:
        return None
    return int(allowed), int((folder / used).read_text())


def _oom_kills_of(folder: Path) -> int:
    events = "memory.events" if (folder / "memory.events").exists() else "memory.oom_control"
    return _numbers(folder / events)["oom_kill"]
