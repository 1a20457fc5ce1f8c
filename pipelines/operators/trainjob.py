"""Training jobs of Kubeflow Trainer (v2): TrainJob, with a TrainingRuntime that says what its pods are like.

    python -m hpml.pipelines.operators.trainjob --cluster JSON [--run ID] train --config JSON --data URI ...

What it makes is checked against the definitions of version 2.0.0, and was never run by it. The runtimes that
Trainer ships cannot be used where Pod Security *restricted* is enforced: a TrainJob may not set the security
context of its pods. So each brings a runtime of its own, which goes with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpml.core.errors import ConfigInvalid, ExitCode
from hpml.pipelines.cluster.causes import conditions
from hpml.pipelines.cluster.client import Json, Resource
from hpml.pipelines.operators.base import Operator, State, Training, state_of
from hpml.pipelines.operators.launcher import main

GROUP = "trainer.kubeflow.org"
RUNTIMES = Resource(f"{GROUP}/v1alpha1", "trainingruntimes")
RESTARTS = 1000  # the launcher gives up earlier, when they lead nowhere


class TrainJobs(Operator):
    """A training as a TrainJob; its nodes meet at the first of them, and all of them have to be there."""

    resource = Resource(f"{GROUP}/v1alpha1", "trainjobs")
    container = "node"  # by this name, in a job of this name, Trainer finds it
    job_label = "jobset.sigs.k8s.io/jobset-name"  # its JobSet has its name
    index_label = "batch.kubernetes.io/job-completion-index"

    def job(self, training: Training) -> Json:
        """The TrainJob. Raises ConfigInvalid for an elastic training."""
        if training.min_nodes < training.config.nodes:
            raise ConfigInvalid(
                "Kubeflow Trainer has no elastic training",
                why=f"min_nodes is {training.min_nodes}, nodes is {training.config.nodes}",
                fix="leave min_nodes out, or use PyTorchJobs",
            )
        return {
            "apiVersion": self.resource.api,
            "kind": "TrainJob",
            "metadata": training.metadata(),
            "spec": {
                "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": training.name},
                "trainer": {
                    "numNodes": training.config.nodes,
                    "numProcPerNode": training.config.nproc_per_node,
                },
            },
        }

    def companions(self, training: Training) -> Sequence[tuple[Resource, Json]]:
        """The TrainingRuntime: a Job whose pods are started again for codes of signals, and for no other."""
        job = {
            "activeDeadlineSeconds": training.timeout_s,
            "backoffLimit": RESTARTS,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": self.container,
                            "operator": "In",
                            "values": sorted({1, *(int(code) for code in ExitCode if 0 < code < 128)}),
                        },
                    },
                ]
            },
            "template": training.pod_template(self.container),
        }
        ancestor = {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}}
        runtime = {
            "apiVersion": RUNTIMES.api,
            "kind": "TrainingRuntime",
            "metadata": training.metadata(),
            "spec": {
                "mlPolicy": {
                    "numNodes": training.config.nodes,
                    "torch": {"numProcPerNode": training.config.nproc_per_node},
                },
                "template": {
                    "spec": {
                        "ttlSecondsAfterFinished": training.cluster.keep_failed_s,
                        "replicatedJobs": [
                            {"name": self.container, "template": {"metadata": ancestor, "spec": job}}
                        ],
                    }
                },
            },
        }
        return [(RUNTIMES, runtime)]

    def state(self, job: Json) -> State:
        """From its conditions; that it runs is not among them."""
        queued = conditions(job, "False").get("Suspended", {})
        since = queued.get("lastTransitionTime")
        return state_of(job, "running", since or job["metadata"].get("creationTimestamp"))


if __name__ == "__main__":
    main(TrainJobs(), sys.argv[1:])
