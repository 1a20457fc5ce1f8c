"""Being asked to stop, noticed where stopping is safe."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """While it is entered, SIGTERM and SIGINT only set `signal`; afterwards they do what they did before."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = max(self.signal, number)
