"""The pods of one job: how they are, why they do not run, and all that they print, in one stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpml.core.errors import HpmlError
from hpml.pipelines.cluster.causes import Cause, cause, cause_of_refusal, has_started
from hpml.pipelines.cluster.client import PODS, Json, Namespace

LAST_LINES_S = 15.0  # without a line, before the logs of a job that is over are given up

Line = tuple[str, str | HpmlError]  # the uid of a pod, and what it printed, or why no more of it can be read


@dataclass
class Follower:
    """Follows the pods that the label selector `labels` finds.

    is_reading: by the uid of each pod that has started, whether the end of its log is still to come.
    """

    cluster: Namespace
    labels: str
    container: str
    is_reading: dict[str, bool] = field(default_factory=dict, init=False)
    _queue: queue.SimpleQueue[tuple[str, str | HpmlError | None]] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    def look(self) -> list[Json]:
        """The pods as they are now, oldest first. The log of each that has started is read from now on."""
        found = self.cluster.find(PODS, labels=self.labels)
        for pod in found:
            uid = pod["metadata"]["uid"]
            if uid not in self.is_reading and has_started(pod, self.container):
                self.is_reading[uid] = True
                threading.Thread(target=self._read, args=(pod, uid), daemon=True).start()
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def _read(self, pod: Json, uid: str) -> None:
        try:
            for line in self.cluster.log(pod, self.container):
                self._queue.put((uid, line))
        except HpmlError as error:
            self._queue.put((uid, error))
        self._queue.put((uid, None))

    def lines(self, seconds: float) -> Iterator[Line]:
        """What the pods print, as it comes, for `seconds`, or until a log comes to its end."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            try:
                uid, line = self._queue.get(timeout=left_s)
            except queue.Empty:
                return
            if line is None:
                self.is_reading[uid] = False
                return
            yield uid, line

    def last_lines(self) -> Iterator[Line]:
        """What is still to be read of a job that is over."""
        until = time.monotonic() + LAST_LINES_S
        while any(self.is_reading.values()) and time.monotonic() < until:
            for line in self.lines(0.1):
                yield line
                until = time.monotonic() + LAST_LINES_S

    def why_waiting(self, job: Json, pods: list[Json]) -> dict[str, Cause]:
        """Why `job` has no pods, or those that are pending do not run, as far as it is known: by name."""
        events = self.cluster.events
        if not pods:
            refused = cause_of_refusal(events(job["metadata"]["uid"]))
            return {"": refused} if refused else {}
        return {
            pod["metadata"]["name"]: why
            for pod in pods
            if pod["status"].get("phase") == "Pending" and (why := cause(pod, events(pod["metadata"]["uid"])))
        }
