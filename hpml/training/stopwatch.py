"""Where the time of a training goes."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Adds up seconds by phase. On a GPU the marks are events on its stream, so that none makes it wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # a phase, and its end: an event, or seconds
        self.start()

    def start(self) -> None:
        """Begin to count from here: what went before belongs to no phase."""
        self.lap("")

    def lap(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        self._marks.append((phase, _gpu_mark() if self._on_gpu else time.perf_counter()))

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, before), (phase, after) in pairwise(self._marks):
            seconds[phase] += before.elapsed_time(after) / 1000 if self._on_gpu else after - before
        seconds.pop("", None)
        self._marks = self._marks[-1:]
        return dict(seconds)


def _gpu_mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
