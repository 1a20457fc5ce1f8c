"""The nodes of the Argo workflow that a run of Kubeflow is: steps, their drivers, their pods.

Kubeflow compiles a task into a DAG node of the task's name, below the node "root", with one child,
`executor`, which has the pod; beside it a node TASK-driver, whose pod starts it. By Kubeflow's own defaults
every node may be tried again, which makes a node NAME(0), NAME(1) of each attempt. The name of a node is its
path: "WORKFLOW(0).root(0).train(0).executor(0)". Its id is the workflow's name and a hash of that.

Read from the workflow's manifest: what the API makes of it (`task_details`) lacks why a pod waits, and stays
as it was once the nodes have more than 1 MiB, which Argo then packs (`compressedNodes`).
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hpml.core.errors import Unavailable

_MAX_BYTES = 64 << 20  # of unpacked nodes
_PART = re.compile(r"(.*?)(?:\((\d+)\))?")


class Node(BaseModel):
    """A node, as far as it concerns us; fields as in Argo, `phase` as in its NodePhase."""

    id: str = ""
    name: str = ""
    type: str = ""
    phase: str = ""
    message: str = ""
    template: str = Field(default="", alias="templateName")
    started_at: datetime | None = Field(default=None, alias="startedAt")
    finished_at: datetime | None = Field(default=None, alias="finishedAt")

    @property
    def has_failed(self) -> bool:
        """Whether it ended, and not well."""
        return self.phase in ("Failed", "Error")

    @property
    def started_at_s(self) -> float:
        """When it started, as a time of Unix; 0 while it has not."""
        return self.started_at.timestamp() if self.started_at else 0.0

    @property
    def seconds(self) -> float:
        """How long it took; 0 while that is not known."""
        if self.started_at is None or self.finished_at is None:
            return 0.0
        return max(0.0, (self.finished_at - self.started_at).total_seconds())

    @property
    def path(self) -> tuple[str, ...]:
        """The names on the way to it from below the workflow, without attempts: ("root", "train")."""
        return tuple(name for name, _ in self._parts[1:])

    @property
    def attempts(self) -> tuple[float, ...]:
        """Which attempt each name on the way is; what stands for all attempts at a name is beyond them."""
        return tuple(math.inf if number is None else int(number) for _, number in self._parts)

    @property
    def _parts(self) -> list[tuple[str, str | None]]:
        matches = [_PART.fullmatch(part) for part in self.name.split(".")]
        return [(match[1], match[2]) for match in matches if match]


@dataclass(frozen=True)
class Workflow:
    """A workflow. message: what it says about itself."""

    name: str
    message: str
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, manifest: str) -> Workflow:
        """That of a manifest, JSON; an empty one is of a run that has not started.

        Raises Unavailable if it cannot be read, or Argo keeps its nodes elsewhere.
        """
        try:
            told = json.loads(manifest or "{}")
            status = told.get("status") or {}
            if status.get("offloadNodeStatusVersion"):
                raise Unavailable(
                    "Kubeflow does not tell how far the steps are",
                    why="Argo keeps the nodes of large workflows in a database of its own",
                )
            packed = status.get("compressedNodes")
            nodes = _unpacked(packed) if packed else status.get("nodes") or {}
            found = TypeAdapter(dict[str, Node]).validate_python(nodes)
            return cls(
                told.get("metadata", {}).get("name", ""), status.get("message") or "", (*found.values(),)
            )
        except (ValueError, AttributeError, TypeError, EOFError, OSError, zlib.error) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise Unavailable("Kubeflow tells about a run's workflow in another way", why=why) from None

    def step(self, task: str) -> Node | None:
        """The node of a task; None if it has none yet."""
        return self._newest(("root", task))

    def driver(self, task: str) -> Node | None:
        """The node that starts a task."""
        return self._newest(("root", f"{task}-driver"))

    def is_cached(self, task: str) -> bool:
        """Whether a task that is done was taken from the cache: its executor was left out."""
        executor = self._newest(("root", task, "executor"))
        return executor is not None and executor.phase in ("Skipped", "Omitted")

    def pods(self, task: str) -> list[Node]:
        """The nodes of a task that are pods, newest attempt first."""
        start = ("root", task)
        found = [node for node in self.nodes if node.type == "Pod" and node.path[:2] == start]
        return sorted(found, key=lambda node: node.attempts, reverse=True)

    def pod_name(self, node: Node) -> str:
        """What the pod of a node is called."""
        return f"{self.name}-{node.template}-{node.id.rpartition('-')[2]}"

    def _newest(self, path: tuple[str, ...]) -> Node | None:
        found = [node for node in self.nodes if node.path == path]
        return max(found, key=lambda node: node.attempts, default=None)


def _unpacked(nodes: str) -> Any:
    """What Argo has packed: gzip, in base64. Raises ValueError, EOFError, OSError or zlib.error."""
    packed = base64.b64decode(nodes, validate=True)
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"its nodes have more than {_MAX_BYTES >> 20} MiB")
    return json.loads(data)
