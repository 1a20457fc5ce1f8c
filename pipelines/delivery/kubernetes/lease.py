"""One rollout at a time, by a Lease of the cluster: who has it renews it, who is killed loses it soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from hpml.core.background import beside
from hpml.core.errors import HpmlError, Unavailable
from hpml.pipelines.cluster.client import Namespace, Resource
from hpml.pipelines.delivery.evidence import deployer

LEASES = Resource("coordination.k8s.io/v1", "leases")
_LASTS_S = 15
_RENEWED_EVERY_S = 4.0
_LOOK_EVERY_S = 1.0


class Lease:
    """The Lease `name` of a namespace."""

    def __init__(self, cluster: Namespace, name: str, say: Callable[[str], None]) -> None:
        self._cluster, self._name, self._say = cluster, name, say
        self._is_lost = threading.Event()
        self._version = ""  # of the Lease as we wrote it last: whoever takes it makes another

    @contextmanager
    def held(self, wait_s: float) -> Iterator[None]:
        """While entered, nobody else has it. Raises Unavailable naming who has it after `wait_s`."""
        self._acquire(time.monotonic() + wait_s)
        try:
            with beside(self._renew, "lease"):
                yield
        finally:
            with suppress(HpmlError):  # it ends by itself
                self._write(None)

    def check(self) -> None:
        """Raise Unavailable if it was lost, so that nothing is changed beside another rollout."""
        if self._is_lost.is_set():
            raise Unavailable(
                f"the lease {self._name} was lost",
                why="the cluster did not answer in time",
                fix="deploy again",
            )

    def _acquire(self, until_s: float) -> None:
        seen, unchanged_since_s, told = "", time.monotonic(), ""
        while True:
            found = self._cluster.get(LEASES, self._name)
            holder = str(((found or {}).get("spec") or {}).get("holderIdentity") or "")
            if found and holder and found["metadata"]["resourceVersion"] != seen:
                seen, unchanged_since_s = found["metadata"]["resourceVersion"], time.monotonic()
            # By our own clock: that of whoever has it may be another.
            is_free = not holder or time.monotonic() - unchanged_since_s > _LASTS_S
            if is_free and self._take(found):
                return
            if time.monotonic() > until_s:
                raise Unavailable(
                    f"another rollout is under way, by {holder}",
                    fix="wait until it has ended; --wait-s is how long",
                )
            if holder and holder != told:
                self._say(f"waiting for the rollout of {holder}, or for its end to be known")
                told = holder
            time.sleep(_LOOK_EVERY_S)

    def _take(self, found: dict[str, Any] | None) -> bool:
        if found is not None:
            self._version = found["metadata"]["resourceVersion"]
            return self._write(deployer())
        metadata = {"name": self._name}
        body = {"apiVersion": LEASES.api, "kind": "Lease", "metadata": metadata, "spec": _held_by(deployer())}
        return self._is_ours(self._cluster.create(LEASES, body))

    def _write(self, holder: str | None) -> bool:
        """Whether it was still as we know it, and is now held by `holder`."""
        version = {"resourceVersion": self._version}
        changes = {"metadata": version, "spec": _held_by(holder)}
        return self._is_ours(self._cluster.patch(LEASES, self._name, changes))

    def _is_ours(self, answer: dict[str, Any] | None) -> bool:
        if answer is None:
            return False
        self._version = answer["metadata"]["resourceVersion"]
        return True

    def _renew(self, stop: threading.Event) -> None:
        renewed_s = time.monotonic()
        while not stop.wait(_RENEWED_EVERY_S):
            try:
                is_ours = self._write(deployer())
                renewed_s = time.monotonic() if is_ours else renewed_s
            except HpmlError:
                is_ours = time.monotonic() - renewed_s < _LASTS_S
            if not is_ours:
                self._is_lost.set()
                return


def _held_by(holder: str | None) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"holderIdentity": holder, "leaseDurationSeconds": _LASTS_S, "renewTime": now}
