"""What Kubeflow does around each task of a compiled pipeline, for tests that run the tasks without it.

The driver resolves a task's inputs and decides where its outputs are to be; the launcher, in the pod, puts
input artifacts on the disk, replaces placeholders in the arguments, makes the folders above the outputs, and
reads what the step handed over. Messages are of KFP's own types: what it would not read fails here, too.

As with ML Metadata of KFP 2.17, an artifact has an id, which is its name wherever it is an input, and there
is one INPUT event for an artifact and an execution: a task that reads one by two names ends in its driver.
`defaultPipelineRoot` of the pipeline is not looked at, only what the run was given (`root`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

RUN_ID = "6f1d2c3b-0000-4000-8000-000000000042"
_MOUNTS = {"minio://": "/minio/", "s3://": "/s3/"}


class DriverFailed(Exception):
    """A driver ended before its task had a pod."""


@dataclass(frozen=True)
class Task:
    """A task that is ready to run: its command line and environment as the container gets them.

    outputs: the path of each output artifact. output_file: where the step says what it hands over.
    patch_bytes: how large that part of its pod's spec is which depends on the pipeline; the workflow has it
    several times.
    """

    name: str
    image: str
    command: list[str]
    environment: dict[str, str]
    outputs: dict[str, str]
    output_file: str
    patch_bytes: int


class Kubeflow:
    """One run of a pipeline.

    root: the URI, or the absolute path, below which artifacts are. outputs: the folder for output files.
    parameters: of the run; those that are absent have the pipeline's defaults.
    """

    def __init__(
        self, text: str, *, root: str, outputs: str, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self.spec, self.platform = yaml.safe_load_all(text)
        self._root, self._outputs = root, outputs
        defaults = self.spec["root"]["inputDefinitions"]["parameters"]
        self._parameters = {name: given["defaultValue"] for name, given in defaults.items()} | dict(
            parameters or {}
        )
        self._artifacts: dict[str, dict[str, Any]] = {}
        self._ids = count(1)

    def tasks(self) -> Iterator[Task]:
        """The tasks, each after those it depends on; the next one is asked for when one is done."""
        waiting = dict(self.spec["root"]["dag"]["tasks"])
        while waiting:
            ready = [name for name, task in waiting.items() if not waiting.keys() & _parents(task)]
            assert ready, f"a cycle among {sorted(waiting)}"
            for name in ready:
                yield self._ready(name, waiting.pop(name))

    def finish(self, task: Task, output_file: Path) -> dict[str, Any]:
        """Take over what a step handed over; returns the metadata of each of its artifacts."""
        told = json_format.Parse(output_file.read_text(), pipeline_spec_pb2.ExecutorOutput())
        for name, artifact in json_format.MessageToDict(told).get("artifacts", {}).items():
            known = self._artifacts[task.name][name]
            known["metadata"] = known.get("metadata", {}) | artifact["artifacts"][0].get("metadata", {})
        return {name: known.get("metadata", {}) for name, known in self._artifacts[task.name].items()}

    def path(self, uri: str) -> str:
        """Where an artifact is in a pod."""
        for scheme, mount in _MOUNTS.items():
            if uri.startswith(scheme):
                return mount + uri.removeprefix(scheme)
        return uri

    # ----------------------------------------------------------------------------------- driver and launcher

    def _ready(self, name: str, task: Mapping[str, Any]) -> Task:
        component = self.spec["components"][task["componentRef"]["name"]]
        label = component["executorLabel"]
        container = self.spec["deploymentSpec"]["executors"][label]["container"]
        executor_input = self._executor_input(name, task, component)
        placeholders = self._placeholders(executor_input)
        environment = {item["name"]: item["value"] for item in container["env"]}
        environment |= self._from_platform(label)
        line = [_replaced(text, placeholders) for text in [*container["command"], *container["args"]]]
        return Task(
            name=name,
            image=container["image"],
            command=[_expanded(text, environment) for text in line],
            environment=environment,
            outputs={
                output: self.path(artifact["uri"]) for output, artifact in self._artifacts[name].items()
            },
            output_file=executor_input["outputs"]["outputFile"],
            patch_bytes=sum(len(json.dumps(part)) for part in (executor_input, component, container)),
        )

    def _executor_input(
        self, name: str, task: Mapping[str, Any], component: Mapping[str, Any]
    ) -> dict[str, Any]:
        given = task.get("inputs", {})
        inputs = {}
        for key, source in given.get("artifacts", {}).items():
            produced = source["taskOutputArtifact"]
            artifact = self._artifacts[produced["producerTask"]][produced["outputArtifactKey"]]
            inputs[key] = {"artifacts": [artifact]}
        ids = [listed["artifacts"][0]["name"] for listed in inputs.values()]
        if len(set(ids)) < len(ids):
            raise DriverFailed(f"{name}: failed to lookup existing execution")
        parameters = {
            key: self._parameters[source["componentInputParameter"]]
            for key, source in given.get("parameters", {}).items()
        }
        self._artifacts[name] = {
            output: {
                "name": str(next(self._ids)),
                "uri": f"{self._root}/{RUN_ID}/{name}/0b5c8e1e/{output}",
                "type": declared["artifactType"],
            }
            for output, declared in component["outputDefinitions"]["artifacts"].items()
        }
        message = json_format.ParseDict(
            {
                "inputs": {"artifacts": inputs, "parameterValues": parameters},
                "outputs": {
                    "artifacts": {
                        output: {"artifacts": [{"uri": artifact["uri"], "type": artifact["type"]}]}
                        for output, artifact in self._artifacts[name].items()
                    },
                    "outputFile": f"{self._outputs}/{name}/output_metadata.json",
                },
            },
            pipeline_spec_pb2.ExecutorInput(),
        )
        return dict(json_format.MessageToDict(message))

    def _placeholders(self, executor_input: Mapping[str, Any]) -> dict[str, str]:
        message = json_format.ParseDict(executor_input, pipeline_spec_pb2.ExecutorInput())
        found = {"{{$}}": json_format.MessageToJson(message, indent=None)}
        for side in ("inputs", "outputs"):
            for name, listed in executor_input.get(side, {}).get("artifacts", {}).items():
                uri = listed["artifacts"][0]["uri"]
                found[f"{{{{$.{side}.artifacts['{name}'].uri}}}}"] = uri
                found[f"{{{{$.{side}.artifacts['{name}'].path}}}}"] = self.path(uri)
        for name, value in executor_input.get("inputs", {}).get("parameterValues", {}).items():
            # As Go prints numbers: without an exponent, and without a fraction where there is none.
            shown = f"{value:.10f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            found[f"{{{{$.inputs.parameters['{name}']}}}}"] = shown
        return found

    def _from_platform(self, label: str) -> dict[str, str]:
        """What the downward API gives; secrets are the test's to give."""
        config = self.platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][label]
        labels = {"metadata.labels['pipeline/runid']": RUN_ID}
        return {item["name"]: labels[item["fieldPath"]] for item in config["fieldPathAsEnv"]}


def _parents(task: Mapping[str, Any]) -> set[str]:
    return set(task.get("dependentTasks", ()))


def _replaced(text: str, placeholders: Mapping[str, str]) -> str:
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    assert "{{$" not in text, text
    return text


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """As Kubernetes does: a variable that is not there stays as it is written."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)
