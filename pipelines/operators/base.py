"""A training whose nodes are pods, and what a launcher asks of the operator that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from hpml.components.train.config import TrainConfig
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import Json, Resource
from hpml.pipelines.cluster.config import ClusterConfig


@dataclass(frozen=True)
class Training:
    """A training as an operator makes a job of it. command: of each node's container."""

    name: str
    run: str
    step: str
    config: TrainConfig
    cluster: ClusterConfig
    command: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def min_nodes(self) -> int:
        """With how many nodes it may go on."""
        return self.config.min_nodes or self.config.nodes

    @property
    def timeout_s(self) -> int:
        """How long it may take, from its first pod on."""
        timeout_s = self.cluster.needs("train").timeout_s
        assert timeout_s, "the defaults are filled in"
        return timeout_s

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return pods.labels(self.run, self.step)

    def metadata(self) -> Json:
        """Of its objects; the queue is for the job alone, or Kueue would admit each pod by itself."""
        labels = pods.labels(self.run, self.step, queue=self.cluster.queue)
        return {"name": self.name, "namespace": self.cluster.namespace, "labels": labels}

    def pod_template(self, container_name: str) -> Json:
        """The pod of a node."""
        needs = self.cluster.needs("train")
        return pods.pod_template(
            self.cluster, needs, self.command, labels=self.labels, env=self.env, name=container_name
        )


@dataclass(frozen=True)
class State:
    """How far a job is. started_at_s: Unix time, 0 if it has not started."""

    phase: Literal["waiting", "queued", "running", "succeeded", "failed"]
    message: str = ""
    started_at_s: float = 0.0


class Operator(Protocol):
    """A kind of job for trainings, and how to read it.

    resource: of the job. container: the one that trains, in its pods. index_label: of its pods, the number of
    the node.
    """

    resource: Resource
    container: str
    index_label: str

    def job(self, training: Training) -> Json:
        """The job, as JSON."""
        ...

    def companions(self, training: Training) -> Sequence[tuple[Resource, Json]]:
        """What the job refers to, under the job's name, and what is of no use without it."""
        ...

    def pods_of(self, name: str) -> str:
        """A label selector of the pods of the job `name`."""
        ...

    def state(self, job: Json) -> State:
        """What the status of a job says."""
        ...


def unix_time(timestamp: str) -> float:
    """Seconds since 1970 of a Kubernetes timestamp; 0 for an empty one."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
