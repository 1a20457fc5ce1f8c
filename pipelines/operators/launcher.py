"""The train step when its workers are other pods: starts them, follows them, returns what they made.

Runs in the client image under the launcher's service account, or on a laptop with KUBECONFIG. What kind of
job it makes is an operator's business: pipelines/operators/pytorchjob.py, pipelines/operators/trainjob.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpml.artifacts.folder import MANIFEST, Manifest, read_manifest
from hpml.components.__main__ import Parser, arguments_of, parse, tell
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Events, validate
from hpml.core.errors import UsageError, explained
from hpml.io import storage
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import (
    PODS,
    TOKEN,
    Json,
    Namespace,
    Say,
    connect,
    own_namespace,
    say_on_stderr,
)
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.operators.base import Operator, Training
from hpml.pipelines.operators.follow import Launch
from hpml.steps import container
from hpml.steps.job import Job, stop_on_sigterm
from hpml.steps.step_tracking import reported

NODE = ("python", "-m", "hpml.components.train.node", "-m", "hpml.components")
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a lost worker is a stack trace to it; the node says it in a line


def pod_of_launcher(environment: Mapping[str, str]) -> str:
    """The name of the pod that this process runs in, as our executors and Kubeflow tell it; else empty."""
    return environment.get("HPML_POD_NAME") or environment.get("KFP_POD_NAME") or ""


def owner_of_launcher(kube: Namespace, pod: str, say: Say) -> Json | None:
    """What the job of the launcher in `pod` is to go with, as a reference; None for a pod of elsewhere.

    It is what controls the pod (a Job, a workflow): that outlives the pod, so that the next launcher finds
    the job, and goes with the run. Only where nothing controls the pod is it the pod itself.
    """
    found = kube.get(PODS, pod) if pod else None
    if found is None:
        if pod or TOKEN.exists():
            say(f"which pod of {kube.name} this is, nobody said: the training job will not go with the run")
        return None
    for reference in found["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return pods.owner_reference({**reference, "metadata": reference})
    return pods.owner_reference({"apiVersion": "v1", "kind": "Pod", **found})


def in_log_and_events(events: Events) -> Say:
    """Tells the user something in the log of the step, and wherever the run is watched."""

    def say(text: str) -> None:
        say_on_stderr(text)
        events.write("note", text=text)

    return say


# ----------------------------------------------------------------------------------------------- command line


def main(operator: Operator, arguments: Sequence[str]) -> None:
    """Be the train step: `--cluster JSON [--run ID] [--step NAME] train ...`, with what the entrypoint takes.

    Run and step are by default those of the environment, HPML_RUN and HPML_STEP.
    """
    with explained(debug="--debug" in arguments):
        stop_on_sigterm()
        with container.refusals_told(arguments, reported(os.environ)):
            cluster, run, step, rest = _own_arguments(arguments)
            command = parse(rest)
            if command.stage != "train":
                raise UsageError(f"{command.stage} cannot be launched", why="the stage with workers is train")
        with container.reporting(command.job, reported(os.environ)) as job:
            events = container.events_of(job)
            with explained(debug="--debug" in arguments, record=events.write):
                say = in_log_and_events(events)
                pod = pod_of_launcher(os.environ)
                cluster = where_it_runs(cluster, pod, say)
                handover = f"{cluster.store}/handover/{run}/{step}" if command.kubeflow else ""
                job = handed_over(job, handover) if handover else job
                training = training_of(job, cluster, run, step)
                kube = connect(cluster.namespace, say=say)
                owner = owner_of_launcher(kube, pod, say)
                Launch(operator, training, kube, events, owner, pod, say).run()
                manifest = manifest_at(job.out)
                if command.kubeflow:
                    storage.fetch(job.out, Path(command.kubeflow.out()))
                    command.kubeflow.deliver(command.stage, manifest)
                    storage.delete(handover)
                container.tell_finished(events, manifest)
                tell(manifest)


def where_it_runs(cluster: ClusterConfig, pod: str, say: Say) -> ClusterConfig:
    """`cluster` as it is for a launcher whose pod is in another namespace, such as a step of Kubeflow.

    Its workers are made there, as the pod's own account, whose token they do not get: the account of the
    stages is elsewhere, and so is what could own them.
    """
    own = own_namespace()
    if own in ("", cluster.namespace):
        return cluster
    found = connect(own, say=say).get(PODS, pod) if pod else None
    account = found["spec"].get("serviceAccountName", "default") if found else "default"
    say(f"the workers are made in the namespace {own}, as {account}, where this pod is")
    return cluster.model_copy(update={"namespace": own, "stage_account": account})


def handed_over(job: Job, place: str) -> Job:
    """`job` by URIs below `place`, where its inputs, which only this machine has, are put for other pods."""
    inputs: dict[str, str | Mapping[str, str]] = {}
    for name, given in job.inputs.items():
        assert isinstance(given, str), "what is launched reads single artifacts"
        storage.upload(Path(given), f"{place}/{name}")
        inputs[name] = f"{place}/{name}"
    return replace(job, inputs=inputs, out=f"{place}/out")


def _own_arguments(arguments: Sequence[str]) -> tuple[ClusterConfig, str, str, list[str]]:
    parser = Parser(
        prog=f"python -m hpml.pipelines.operators.{Path(sys.argv[0]).stem}",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--cluster", default="{}", metavar="JSON", help="the cluster section of the recipe")
    parser.add_argument("--run", default=os.environ.get("HPML_RUN", ""), help="the run's id")
    parser.add_argument("--step", default=os.environ.get("HPML_STEP", "train"), help="the step's name")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="train ...", help="as for the entrypoint")
    given = parser.parse_args(arguments)
    if not given.run:
        raise UsageError("the run has no id", fix="pass --run, or set HPML_RUN")
    try:
        fields = json.loads(given.cluster)
    except (ValueError, RecursionError) as error:
        raise UsageError("--cluster is not JSON", why=str(error)) from None
    cluster: ClusterConfig = validate(ClusterConfig, fields, where="--cluster")
    return cluster, given.run, given.step, given.rest


def training_of(job: Job, cluster: ClusterConfig, run: str, step: str) -> Training:
    """The training that `job`, the train step of a run, asks for.

    Raises ConfigInvalid if its config is, UsageError if its pods could not reach its artifacts.
    """
    config: TrainConfig = validate(TrainConfig, job.config, where="the config of train")
    for flag, uri in (("--data", job.inputs["data"]), ("--out", job.out), ("--scratch", job.scratch)):
        if not storage.is_remote(str(uri)):
            raise UsageError(f"{flag} {str(uri)!r} is out of reach for other pods", fix="name an s3:// URI")
    given = replace(job, config=config.model_dump(mode="json"), events=container.STDOUT)
    paths = os.pathsep.join(job.import_paths)
    return Training(
        name=pods.object_name("hpml", run, step),  # a Service is named after it: it begins with a letter
        run=run,
        step=step,
        config=config,
        cluster=cluster,
        command=(*NODE, *arguments_of(given)),
        env=QUIET | ({"HPML_IMPORT_PATHS": paths} if paths else {}),
    )


def manifest_at(uri: str) -> Manifest:
    """What the workers made. Raises StageFailed if there is nothing, or it is damaged."""
    with tempfile.TemporaryDirectory(prefix="hpml-") as folder:
        Path(folder, MANIFEST).write_text(storage.read_text(f"{uri.rstrip('/')}/{MANIFEST}"))
        return read_manifest(Path(folder))
