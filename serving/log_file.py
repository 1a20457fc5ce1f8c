"""What a server in the background says, in a file that does not grow without end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from hpml.core.errors import ConfigInvalid

MOST_BYTES = 10_000_000
_LOOK_EVERY_S = 1.0


class LogFile:
    """Takes all that this process says, its libraries in C++ included; what no longer fits is in FILE.1."""

    def __init__(self, path: Path, tell: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        """Raises ConfigInvalid if it cannot be written. tell: where a line goes for whoever started it."""
        self._path, self._tell, self._most_bytes = path, tell, most_bytes
        try:
            self._open()
        except OSError as error:
            raise ConfigInvalid(f"the log {path} cannot be written", why=str(error.strerror)) from None

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for output in (1, 2):
            os.dup2(descriptor, output)
        os.close(descriptor)

    def begin_anew_if_full(self) -> None:
        """What was said so far becomes FILE.1, in place of the one before. Raises OSError."""
        if os.fstat(2).st_size > self._most_bytes:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._open()

    async def keep_bounded(self) -> None:
        """Look once a second, for as long as this runs."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self.begin_anew_if_full()
            except OSError as error:
                self._tell(f"warning: the log is not bounded any more: {error}")
                return
