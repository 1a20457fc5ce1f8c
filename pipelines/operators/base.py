"""A training whose nodes are pods, and what a launcher asks of the operator that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from hpml.components.train.config import TrainConfig
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.causes import conditions
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

    def metadata(self) -> Json:
        """Of its objects; the queue is for the job alone, or Kueue would admit each pod by itself."""
        labels = pods.labels(self.run, self.step, queue=self.cluster.queue)
        return {"name": self.name, "namespace": self.cluster.namespace, "labels": labels}

    def pod_template(self, container_name: str) -> Json:
        """The pod of a node."""
        needs, labels = self.cluster.needs("train"), pods.labels(self.run, self.step)
        return pods.pod_template(
            self.cluster, needs, self.command, labels=labels, env=self.env, name=container_name
        )


Phase = Literal["waiting", "queued", "running", "succeeded", "failed"]
_PHASES: dict[str, Phase] = {  # by the condition that says so; the first that holds counts
    "Failed": "failed",
    "Succeeded": "succeeded",
    "Complete": "succeeded",
    "Suspended": "queued",
    "Running": "running",
}


@dataclass(frozen=True)
class State:
    """How far a job is. started_at_s: Unix time, 0 if it has not started."""

    phase: Phase
    message: str = ""
    started_at_s: float = 0.0


def state_of(job: Json, otherwise: Phase, started_at: str | None) -> State:
    """By its conditions; `otherwise` if none tells. started_at: when it left the queue, if it has."""
    holding = conditions(job)
    started_at_s = datetime.fromisoformat(started_at).timestamp() if started_at else 0.0
    for kind, phase in _PHASES.items():
        if kind in holding:
            return State(phase, str(holding[kind].get("message", "")), started_at_s)
    return State(otherwise, "", started_at_s)


class Operator(ABC):
    """A kind of job for trainings, and how to read it.

    resource: of the job. container: the one that trains, in its pods. job_label: of its pods, the name of the
    job. index_label: likewise, the number of the node.
    """

    resource: Resource
    container: str
    job_label: str
    index_label: str

    @abstractmethod
    def job(self, training: Training) -> Json:
        """The job, as JSON."""

    def companions(self, training: Training) -> Sequence[tuple[Resource, Json]]:
        """What the job refers to, under the job's name, and what is of no use without it."""
        return ()

    def pods_of(self, name: str) -> str:
        """A label selector of the pods of the job `name`."""
        return f"{self.job_label}={name}"

    @abstractmethod
    def state(self, job: Json) -> State:
        """What the status of a job says."""
