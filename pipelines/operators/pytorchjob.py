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
from collections.abc import Sequence

from hpml.pipelines.cluster.client import Json, Resource
from hpml.pipelines.operators.base import State, Training, unix_time
from hpml.pipelines.operators.launcher import main

JOB_NAME_LABEL = "training.kubeflow.org/job-name"


class PyTorchJobs:
    """A training as a PyTorchJob."""

    resource = Resource("kubeflow.org/v1", "pytorchjobs")
    container = "pytorch"  # by this name the operator finds it
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

    def companions(self, training: Training) -> Sequence[tuple[Resource, Json]]:
        """None."""
        return ()

    def pods_of(self, name: str) -> str:
        """A label selector of the pods of the job `name`."""
        return f"{JOB_NAME_LABEL}={name}"

    def state(self, job: Json) -> State:
        """From its conditions: those that hold are True, and what is over becomes False."""
        status = job.get("status") or {}
        holding = {
            condition["type"]: str(condition.get("message", ""))
            for condition in status.get("conditions") or ()
            if condition["status"] == "True"
        }
        started_at_s = unix_time(str(status.get("startTime") or ""))
        if "Failed" in holding:
            return State("failed", holding["Failed"], started_at_s)
        if "Succeeded" in holding:
            return State("succeeded", holding["Succeeded"], started_at_s)
        if "Suspended" in holding:
            return State("queued", holding["Suspended"])
        return State("running" if "Running" in holding else "waiting", "", started_at_s)


if __name__ == "__main__":
    main(PyTorchJobs(), sys.argv[1:])
