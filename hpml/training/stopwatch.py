"""Where the time of a training goes."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment."""

    def seconds_until(self, later: Any) -> float:
        """The time to another mark of the same kind."""
        ...


class _CpuMark:
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def seconds_until(self, later: _CpuMark) -> float:
        return later._at_s - self._at_s


class _GpuMark:
    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def seconds_until(self, later: _GpuMark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1000


class Stopwatch:
    """Adds up seconds by phase. On a GPU the marks are events on its stream, so that none makes it wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []
        self.start()

    def start(self) -> None:
        """Begin to count from here: what went before belongs to no phase."""
        self.lap("")

    def lap(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        self._marks.append((phase, _GpuMark() if self._on_gpu else _CpuMark()))

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, before), (phase, after) in pairwise(self._marks):
            seconds[phase] += before.seconds_until(after)
        seconds.pop("", None)
        self._marks = self._marks[-1:]
        return dict(seconds)
