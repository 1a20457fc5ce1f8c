"""Passing on, from a thread, the events that a stage and the processes it starts append to a file."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hpml.core.background import beside

EVENT_PREFIX = "#hpml "  # of a line on stdout that is an event, and no part of the log

_EVERY_S = 0.2

Listener = Callable[[dict[str, Any]], None]


class EventTail:
    """Reads what is appended to a file of events. failure: the last event `failed`, if there was one."""

    def __init__(self, file: Path, *, offset: int = 0) -> None:
        self._file, self._offset = file, offset
        self.failure: Mapping[str, Any] | None = None

    def read(self) -> list[dict[str, Any]]:
        """The events since the last call. A line that is still being written is left for the next."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        self.failure = next((event for event in events if event["event"] == "failed"), self.failure)
        return events


def relayed(file: Path, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
    """While entered, every listener is called with each event appended to the file; see contract.Events.

    Leaving passes on the last ones. A listener that cannot go on (a full disk, a closed pipe) is dropped with
    a line on stderr: the stage is not to fail of it.
    """
    told = file.stat().st_size if file.exists() else 0  # by an earlier attempt
    tail, listening = EventTail(file, offset=told), list(listeners)

    def keep_passing_on(stop: threading.Event) -> None:
        while not stop.wait(_EVERY_S):
            _pass_on(tail.read(), listening)
        _pass_on(tail.read(), listening)

    return beside(keep_passing_on, "events")


def _pass_on(events: Iterable[dict[str, Any]], listeners: list[Listener]) -> None:
    for event in events:
        for listener in tuple(listeners):
            try:
                listener(event)
            except OSError as error:
                listeners.remove(listener)
                print(f"events are no longer passed on: {error}", file=sys.stderr, flush=True)


def print_event(event: dict[str, Any]) -> None:
    """Write `event` to stdout as a line of its own, which executors tell from the log by EVENT_PREFIX."""
    sys.stdout.flush()
    sys.stdout.write(f"{EVENT_PREFIX}{json.dumps(event)}\n")
    sys.stdout.flush()


_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "progress": {"done": int, "total": int, "unit": str, "note": str, "time_s": (int, float)},
    "metric": {"name": str, "value": (int, float), "index": int, "time_s": (int, float)},
    "note": {"text": str},
    "failed": {"message": str, "exit_code": int},
    "finished": {"digest": str, "metrics": dict, "incomplete": str},
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"finished": {"incomplete": ""}}  # versions before tell none


def read_event(line: str) -> dict[str, Any] | None:
    """The event that a line of a log is, its fields checked; None if it is an ordinary line."""
    if not line.startswith(EVENT_PREFIX):
        return None
    try:
        event = json.loads(line.removeprefix(EVENT_PREFIX))
        event = {**_DEFAULTS.get(event["event"], {}), **event}
        fields = _FIELDS[event["event"]]
        whole = all(isinstance(event[name], expected) for name, expected in fields.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if whole else None
