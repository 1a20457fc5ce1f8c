"""A control group with a limit of memory, for commands that are to show that they keep within it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_SAMPLED_EVERY_S = 0.05
# Writing 0 moves the process that writes.
_ENTER = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"  # 0: itself


@dataclass(frozen=True)
class Used:
    """What a command took at most: its own memory, and with the files that Linux caches for it."""

    seconds: float
    own_bytes: int
    with_cache_bytes: int


class MemoryGroup:
    """A group of at most `limit_bytes`, page cache included, of version 1 or 2 of the interface."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._is_v2 = (folder / "memory.max").exists()
        limit = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        (folder / limit).write_text(str(limit_bytes))
        swap = folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def run(self, command: list[str]) -> Used:
        """Run a command in the group. Raises CalledProcessError if it fails, or is killed."""
        began, own_bytes = time.monotonic(), 0
        if not self._is_v2:
            (self._folder / "memory.max_usage_in_bytes").write_text("0")
        place = str(self._folder / "cgroup.procs")
        process = subprocess.Popen([sys.executable, "-c", _ENTER, place, *command])
        while process.poll() is None:
            own_bytes = max(own_bytes, self._own_bytes())
            time.sleep(_SAMPLED_EVERY_S)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        peak = self._folder / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")
        return Used(time.monotonic() - began, own_bytes, int(peak.read_text()) if peak.exists() else 0)

    def _own_bytes(self) -> int:
        """What no file backs."""
        numbers = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        return int(numbers["anon" if self._is_v2 else "rss"])


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new group, removed at the end. Raises OSError where this user may not make one: root may."""
    root = _MOUNT / "memory" if (_MOUNT / "memory/memory.limit_in_bytes").exists() else _MOUNT
    folder = root / f"hpml-{os.getpid()}"
    folder.mkdir()
    try:
        yield MemoryGroup(folder, limit_bytes)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
