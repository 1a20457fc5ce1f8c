"""The nodes of an Argo workflow, as far as Kubeflow's API shows them, and the pods behind them.

Kubeflow compiles a task into a DAG node of the task's name with one child, `executor`, which has the pod. By
its own defaults every node may be tried again, which makes a node NAME(0), NAME(1) of each attempt. The API
tells a node's display name, its state, and the ids of its children. An id is the workflow's name and a hash
of the node's full name; so the full name that a pod would have can be looked up among the ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pipelines.kubeflow_server import Run, Task

_TEMPLATES = ("system-container-impl", "metadata-0-1-system-container-impl")  # the latter: with a pod label


@dataclass(frozen=True)
class Workflow:
    """The nodes of a workflow by display name, and the ids of all that are a child of another."""

    nodes: Mapping[str, Task]
    ids: frozenset[str]

    @classmethod
    def of(cls, run: Run) -> Workflow:
        """That of a run."""
        ids = {child.pod_name for task in run.tasks for child in task.child_tasks}
        return cls({task.display_name: task for task in run.tasks}, frozenset(ids - {""}))

    def pods(self, task: str) -> list[str]:
        """What the pods of a task can be called, newest attempt first; nothing if it never had one."""
        found = []
        for workflow in sorted({name.rpartition("-")[0] for name in self.ids}):
            levels = [self._attempts(name) for name in (workflow, "root", task, "executor")]
            for path in product(*levels):
                number = _fnv1a(".".join(path))
                if f"{workflow}-{number}" in self.ids:
                    found += [f"{workflow}-{template}-{number}" for template in _TEMPLATES]
        return found

    def _attempts(self, name: str) -> Sequence[str]:
        """The attempts at a node, newest first; where there are none, the node itself."""
        pattern = re.compile(re.escape(name) + r"\((\d+)\)")
        matches = [match for match in map(pattern.fullmatch, self.nodes) if match]
        return [match[0] for match in sorted(matches, key=lambda match: -int(match[1]))] or [name]


def started_at_s(task: Task) -> float:
    """When a node started, as a time of Unix; 0 while it has not."""
    return task.start_time.timestamp() if task.start_time else 0.0


def seconds(task: Task) -> float:
    """How long a node took; 0 while that is not known."""
    if task.start_time is None or task.end_time is None:
        return 0.0
    return max(0.0, (task.end_time - task.start_time).total_seconds())


def _fnv1a(text: str) -> int:
    """The 32-bit FNV-1a hash, of which Argo makes ids."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
