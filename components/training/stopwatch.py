"""Where the time of a training goes."""

from __future__ import annotations

import time
from collections import Counter

import torch


class Stopwatch:
    """Adds up seconds by phase. On a GPU the marks are events on its stream, so that none makes it wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.start()

    def start(self) -> None:
        """Begin to count from here: what went before belongs to no phase."""
        self.lap("")

    def lap(self, phase: str) -> None:
        """The time since the last mark belongs to `phase`."""
        self._marks.append((phase, self._now()))

    def take(self) -> Counter[str]:
        """Seconds by phase since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += _seconds_between(before, after)
        del seconds[""]
        self._marks = self._marks[-1:]
        return seconds

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    return before.elapsed_time(after) / 1000
