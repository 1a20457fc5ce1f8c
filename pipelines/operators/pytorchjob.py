"""Training jobs of the Kubeflow training operator (v1): PyTorchJob. The only file that knows its CRD.

    python -m hpml.pipelines.operators.pytorchjob --cluster JSON [--run ID] train --config JSON --data URI ...

Seen on version 1.8.1 of the operator, and why the job looks as it does:

* A worker of a job that has a Master gets an init container, which Pod Security *restricted* refuses. Without
  a Master, and with an elasticPolicy, there is none: the first worker is where all meet.
* The job is Succeeded when any worker is, and its running pods are then deleted. torchrun makes its nodes
  wait for each other at the end, so rank 0 has published by then.
* restartPolicy ExitCode fails the job for an exit code below 128, and makes a new pod for others, without the
  growing pauses of OnFailure; `hpml.components.train.node` ends with codes to suit. torchrun's own restarts
  are off, because they would repeat what fails for good.
* activeDeadlineSeconds is looked at only when something else happens to the job, so the launcher looks too.
  ttlSecondsAfterFinished does nothing for a job that failed by ExitCode; it goes with its owner.
"""

from __future__ import annotations

import sys

from hpml.pipelines.cluster.client import Json, Resource
from hpml.pipelines.operators.base import Operator, State, Training, state_of
from hpml.pipelines.operators.launcher import main


class PyTorchJobs(Operator):
    """A training as a PyTorchJob."""

    resource = Resource("kubeflow.org/v1", "pytorchjobs")
    container = "pytorch"  # by this name the operator finds it
    job_label = "training.kubeflow.org/job-name"
    index_label = "training.kubeflow.org/replica-index"

    def job(self, training: Training) -> Json:
        """The PyTorchJob: Workers only, which meet by c10d at the first of them."""
        template = training.pod_template(self.container)
        del template["spec"]["restartPolicy"]  # the operator's, below
        return {
            "apiVersion": self.resource.api,
            "kind": "PyTorchJob",
            "metadata": training.metadata(),
            "spec": {
                "nprocPerNode": str(training.config.nproc_per_node),
                "elasticPolicy": {
                    "rdzvBackend": "c10d",
                    "rdzvId": training.name,
                    "minReplicas": training.min_nodes,
                    "maxReplicas": training.config.nodes,
                    "maxRestarts": 0,
                },
                "runPolicy": {
                    "cleanPodPolicy": "Running",
                    "activeDeadlineSeconds": training.timeout_s,
                    "ttlSecondsAfterFinished": training.cluster.keep_failed_s,
                },
                "pytorchReplicaSpecs": {
                    "Worker": {
                        "replicas": training.config.nodes,
                        "restartPolicy": "ExitCode",
                        "template": template,
                    }
                },
            },
        }

    def state(self, job: Json) -> State:
        """From its conditions: those that hold are True, and what is over becomes False."""
        return state_of(job, "waiting", (job.get("status") or {}).get("startTime"))


if __name__ == "__main__":
    main(PyTorchJobs(), sys.argv[1:])
