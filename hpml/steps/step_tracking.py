"""A step that reports itself to MLflow, as in a pod, where no executor does it for all steps of a run.

Its events go to an outbox of its own, and a process beside it sends them (see `hpml.io.tracking`). What
MLflow has not taken when the step has ended is put at `<store>/tracking/<run>/<step>.<random>.jsonl`, and
whichever step starts next, of this run or of another, sends it and deletes it. No stage waits for MLflow
longer than some 20 seconds, and none fails of it.

The run, which all its steps report to, ends as FAILED or KILLED with a step that does; and when its last step
(HPML_LAST=1) is done, as its steps say: FAILED if one of them failed, FINISHED otherwise.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpml.core.errors import ExitCode, HpmlError, StageFailed
from hpml.io import storage
from hpml.io.tracking import Outbox, Status, are_events, can_send, start_sender, unsent

_FOLDER = "tracking"
_LEFT_OVER_AT_ONCE = 100  # outboxes of others that one step sends
_WAIT_S = 15.0  # for the sender to send all
_LAST_ATTEMPT_S = 10.0  # for its last attempt, once it was told to stop


@dataclass(frozen=True)
class Reported:
    """What a step reports as, and where to.

    recipe: the experiment in MLflow. store: the URI under which what is left over is kept; may be empty.
    is_last: whether the run is over when this step is done.
    """

    tracking_uri: str
    run: str
    recipe: str
    step: str
    store: str
    is_last: bool


def reported(environment: Mapping[str, str]) -> Reported | None:
    """What the environment of a pod says of its step; None if it is not to report itself."""
    uri, run, step = (environment.get(name, "") for name in ("MLFLOW_TRACKING_URI", "HPML_RUN", "HPML_STEP"))
    if not (uri and run and step):
        return None
    return Reported(
        tracking_uri=uri,
        run=run,
        recipe=environment.get("HPML_RECIPE") or "hpml",
        step=step,
        store=environment.get("HPML_STORE", "").rstrip("/"),
        is_last=environment.get("HPML_LAST") == "1",
    )


class StepTracking:
    """While entered, what it hears of a step is on its way to MLflow. folder: an empty one, for its files.

    What goes wrong is said on stderr; nothing is raised.
    """

    def __init__(self, what: Reported, config: Any, folder: Path) -> None:
        self._what, self._config, self._folder = what, config, folder
        self._left_over: dict[str, Path] = {}  # by URI, outboxes of others
        self._interrupted = False
        self._sender: subprocess.Popen[bytes] | None = None  # none where there is no mlflow, as in a launcher

    def __enter__(self) -> Self:
        self._started_at = time.monotonic()
        self._outbox = Outbox(self._folder / "outbox.jsonl", self._what.run, self._what.recipe)
        self._outbox.step_started(self._what.step, self._config if isinstance(self._config, Mapping) else {})
        self._take_left_over()
        if can_send():
            self._sender = start_sender(
                self._outbox.path, self._what.tracking_uri, list(self._left_over.values())
            )
        return self

    def hear(self, event: Mapping[str, Any]) -> None:
        """Note what an event of the stage says; see contract.Events and `hpml.components.__main__`."""
        if event["event"] == "metric":
            self._outbox.metric(
                self._what.step, event["name"], event["value"], event["index"], event["time_s"]
            )
        elif event["event"] == "finished":
            missing = {"incomplete": event["incomplete"]} if event.get("incomplete") else {}
            self._end("FINISHED", event["metrics"], {"artifact": event["digest"], **missing})
            if self._what.is_last:
                self._outbox.run_ended(None)
        elif event["event"] == "failed":
            self._interrupted = event["exit_code"] in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
            status: Status = "KILLED" if self._interrupted else "FAILED"
            self._end(status, {}, {"error": event["message"]})
            self._outbox.run_ended(status)

    def _end(self, status: Status, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        self._outbox.step_ended(self._what.step, status, metrics, time.monotonic() - self._started_at, tags)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outbox.closed()
        kept = self._keep_unsent() if self._interrupted else ""  # there may be no time for anything else
        self._end_sender()
        for uri, file in self._left_over.items():
            if not unsent(file, self._what.tracking_uri):
                with _store_told():
                    storage.delete(uri)
        remaining = unsent(self._outbox.path, self._what.tracking_uri).count("\n")
        if not remaining:
            if kept:
                with _store_told():
                    storage.delete(kept)
            return
        kept = kept or self._keep_unsent()
        fate = f"they are kept at {kept} and sent by the next step" if kept else "they are lost"
        why = "MLflow did not take" if self._sender else "without mlflow here, nothing sends"
        print(f"tracking: {why} {remaining} events; {fate}", file=sys.stderr, flush=True)

    def _end_sender(self) -> None:
        """It ends by itself when all is sent; until then, it has a bounded time."""
        if not self._sender:
            return
        for end, seconds in ((self._sender.terminate, _WAIT_S), (self._sender.kill, _LAST_ATTEMPT_S)):
            try:
                self._sender.wait(seconds)
            except subprocess.TimeoutExpired:
                end()
        self._sender.wait()

    # ------------------------------------------------------------------------------------ what is left over

    def _take_left_over(self) -> None:
        """Bring here what other steps could not send."""
        if not self._what.store:
            return
        place = f"{self._what.store}/{_FOLDER}"
        with _store_told():
            for number, name in enumerate(storage.list_names(place)[:_LEFT_OVER_AT_ONCE]):
                uri = f"{place}/{name}"
                text = _events_at(uri)
                if text:
                    self._left_over[uri] = self._folder / f"left-over-{number}.jsonl"
                    self._left_over[uri].write_text(text)

    def _keep_unsent(self) -> str:
        """The URI where the events that MLflow has not taken are kept; "" if they cannot be."""
        if not self._what.store:
            return ""
        name = f"{self._what.step}.{uuid.uuid4().hex[:12]}.jsonl"
        uri = f"{self._what.store}/{_FOLDER}/{self._what.run}/{name}"
        with _store_told():
            storage.write_text(uri, unsent(self._outbox.path, self._what.tracking_uri))
            return uri
        return ""


@contextmanager
def _store_told() -> Iterator[None]:
    """Say on stderr that the store is not reached, if it is not."""
    try:
        yield
    except HpmlError as error:
        print(f"tracking: events kept in the store are not reached: {error}", file=sys.stderr, flush=True)


def _events_at(uri: str) -> str:
    """The outbox at `uri`; "" if another step was faster, and, with a word on stderr, if it is no outbox."""
    try:
        text = storage.read_text(uri)
    except StageFailed:  # it is gone, or no text
        text = ""
    if are_events(text):
        return text
    if storage.exists(uri):
        print(f"tracking: {uri} holds no events and is not sent", file=sys.stderr, flush=True)
    return ""
