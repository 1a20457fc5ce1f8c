"""What each step of a plan is as a component of Kubeflow Pipelines: interface, command, environment.

Read off the plan, the signatures of the stages and the recipe's `cluster:` section. Knows nothing of kfp:
what writes it down is `pipelines/kubeflow/compile.py`. What a real KFP 2.17 backend does has shaped it:

* Each task is two pods and about 16 s. So there is one task a step, and no condition, loop or importer.
* A step that ends with an exit code is not retried, and pods that are lost are started anew with the same
  arguments. So a step retries what may pass by itself, and is harmless to run twice.
* A step has 0.6 s after SIGTERM, and nothing of a failed attempt is uploaded. So checkpoints go to a place of
  their own in our store while the step runs.
* Every exit code but 0 is shown as 1. So a step tells its code and its reason in its log, as an event.
* ML Metadata takes one input event for an artifact and an execution. So a component declares each artifact
  once, by the name of the step that writes it, and its command line says which inputs it is (--names).
* The spec of each pod, with the metadata of every artifact that it reads, is in the workflow several times;
  above 1 MiB Argo packs it. So metrics are the metadata of an artifact that no step reads.
* KFP replaces "{{...}}" in arguments, Kubernetes replaces "$(...)". So no config may contain either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpml.components.__main__ import Job, arguments_of, source_digest
from hpml.components.executor_input import HTML, METRICS, OUT, SUMMARY, Named
from hpml.core.contract import signature, texts_in
from hpml.core.errors import ConfigInvalid
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.config import ClusterConfig, StageNeeds
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.recipe import Recipe
from hpml.pipelines.stage_needs import needs_of
from hpml.steps.container import WORK

ArtifactType = Literal["Artifact", "Dataset", "Model", "Metrics", "HTML", "Markdown"]
Value = int | float | str

# KFP labels a pod with its run; the label becomes this variable, and Kubernetes puts the variable's value
# into an argument. As a parameter of the component, the run's id would keep KFP's cache from being hit.
KFP_RUN_LABEL, RUN_VARIABLE = "pipeline/runid", "HPML_RUN"

_TYPES: Mapping[str, ArtifactType] = {"dataset": "Dataset", "model": "Model", "engine": "Model"}
_PAGES: Mapping[str, Mapping[str, ArtifactType]] = {"report": {HTML: "HTML", SUMMARY: "Markdown"}}

_LAUNCHER = StageNeeds(cpus=1, memory="512Mi", image="client")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the pipeline that sets `field` of the config of `stage`; left empty, it sets nothing.

    default: the recipe's value.
    """

    name: str
    stage: str
    field: str
    type: type[Value]
    default: Value


@dataclass(frozen=True)
class Component:
    """A step as a component.

    task: its name in the pipeline. inputs: the artifacts it reads, each with its type and the step that
    writes it. cached: whether KFP may take an earlier result instead. needs: with every default filled in.
    """

    step: str
    task: str
    inputs: Mapping[str, tuple[ArtifactType, str]]
    outputs: Mapping[str, ArtifactType]
    parameters: tuple[Parameter, ...]
    image: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    needs: StageNeeds
    cached: bool


def components_of(plan: Plan, recipe: Recipe) -> list[Component]:
    """The steps of `plan` in an order in which they could run.

    Raises ConfigInvalid if a config cannot be handed to Kubeflow, or names files of this machine.
    """
    _check_inert("the recipe's cluster", recipe.cluster.model_dump(mode="json"))
    tasks = _task_names(plan)
    settable = {item.name: item for node in plan.nodes.values() for item in _parameters(node)}
    found = []
    for node in plan.nodes.values():
        parameters = {item.name: item for item in _parameters(node)}
        if _checks(node):
            parameters |= {name: item for name, item in settable.items() if name not in parameters}
        found.append(_component(node, tuple(parameters.values()), tasks, recipe, plan))
    return found


def _checks(node: Node) -> bool:
    """Whether a step checks the parameters of all others: at once in every run, and it has no cached result.

    Else a wrong goal would be refused by the step that reads it, hours later.
    """
    return not node.parents() and not _may_be_cached(node)


def _task_names(plan: Plan) -> dict[str, str]:
    """A DNS label for each step: its name, wherever that is one."""
    tasks = {name: pods.object_name(name) for name in plan.nodes}
    assert len(set(tasks.values())) == len(tasks), "object names stand for one step each"
    return tasks


def _component(
    node: Node, parameters: tuple[Parameter, ...], tasks: Mapping[str, str], recipe: Recipe, plan: Plan
) -> Component:
    cluster = recipe.cluster
    _check_reachable(node)
    inputs = {_artifact(tasks[step]): (_type_of(plan.nodes[step]), step) for step in node.parents()}
    launched = node.stage == "train" and node.config.nodes > 1  # type: ignore[attr-defined]
    needs = cluster.needs(node.stage)
    command: tuple[str, ...] = ("python", "-m", "hpml.components")
    if launched:
        needs = _LAUNCHER.model_copy(update={"timeout_s": needs.timeout_s})
        command = (*cluster.launcher, "--cluster", cluster.model_dump_json(exclude_defaults=True))
    assert needs.image, "the defaults are filled in"
    names = node.present({step: _artifact(task) for step, task in tasks.items()})
    arguments = _arguments(node, names, parameters, cluster)
    told = pods.environment(cluster, "", recipe.name, node.name)
    environment = {name: value for name, value in told.items() if name != RUN_VARIABLE}
    if node.name == list(plan.nodes)[-1]:
        environment["HPML_LAST"] = "1"  # with it the run is over in MLflow too
    return Component(
        step=node.name,
        task=tasks[node.name],
        inputs=inputs,
        outputs={OUT: _type_of(node), METRICS: "Metrics", **_PAGES.get(node.stage, {})},
        parameters=parameters,
        image=cluster.image(needs.image),
        command=command,
        arguments=arguments,
        environment={"HOME": "/tmp", **environment},  # noqa: S108 - the pod's own
        needs=needs,
        cached=_may_be_cached(node),
    )


# ------------------------------------------------------------------------------------------------ interface


def _type_of(node: Node) -> ArtifactType:
    return _TYPES.get(signature(node.run).output_kind, "Artifact")


def _artifact(task: str) -> str:
    """How a component calls the artifact that a task writes: as an identifier, which kfp wants."""
    return task.replace("-", "_")


def _parameters(node: Node) -> tuple[Parameter, ...]:
    needs, fields = needs_of(node.stage), type(node.config).model_fields
    return tuple(
        Parameter(
            needs.settable_prefix + name,
            node.stage,
            name,
            *_typed(fields[name].annotation, getattr(node.config, name)),
        )
        for name in needs.settable
        if name in fields
    )


def _typed(annotation: Any, value: Any) -> tuple[type[Value], Value]:
    """The type and the default of a parameter; one that may be none is a text, empty for none."""
    if annotation in (int, float):
        return annotation, value
    return str, "" if value is None else str(value)


# --------------------------------------------------------------------------------------------- command line


def _arguments(
    node: Node, names: Mapping[str, Named], parameters: Iterable[Parameter], cluster: ClusterConfig
) -> tuple[str, ...]:
    """The arguments of the entrypoint. Where artifacts are is said by the engine input, "{{$}}"."""
    config = node.config.model_dump(mode="json")
    _check_inert(f"the config of step {node.name}", config)
    job = Job(
        run=node.run_path,
        config=config,
        inputs={},
        out="",
        scratch=_scratch(node, cluster),
        threads=cluster.needs(node.stage).threads,
        events="-",
        code_digest=source_digest(),  # so that KFP's cache forgets what other code has made
    )
    arguments = arguments_of(job)
    for parameter in parameters:
        own = parameter.stage == node.stage
        flag, field = (
            ("--set", parameter.field) if own else ("--check", f"{parameter.stage}.{parameter.field}")
        )
        arguments += [flag, f"{field}={{{{$.inputs.parameters['{parameter.name}']}}}}"]
    if names:
        arguments += ["--names", json.dumps(names)]
    return (*arguments, "--executor-input", "{{$}}")


def _scratch(node: Node, cluster: ClusterConfig) -> str:
    """Where what a next attempt goes on from is kept; empty for a step that has none.

    Of what is done for this hardware only, KFP has no cached result to give: there a next run goes on, too.
    """
    row = needs_of(node.stage)
    if not row.checkpoints:
        return ""
    return f"{cluster.store}/scratch/{WORK if row.hardware_bound else f'$({RUN_VARIABLE})'}/{node.name}"


def _check_reachable(node: Node) -> None:
    """Refuse data that only this machine has."""
    section = "data" if node.stage == "prepare" else node.stage
    for name, value in node.config:
        if isinstance(value, Path):
            raise ConfigInvalid(
                f"step {node.name} cannot read {name}: {value} in a pod",
                why="it is a path of this machine",
                fix=f"put it in the store and give its URI: --set {section}.{name}=s3://BUCKET/KEY",
            )


def _check_inert(what: str, value: Any) -> None:
    """Refuse what KFP or Kubernetes would take for something to be replaced."""
    for text in texts_in(value):
        for mark in ("{{", "$("):
            if mark in text:
                raise ConfigInvalid(
                    f"{what} cannot be handed to Kubeflow",
                    why=f"{text[:60]!r} contains {mark!r}, which is replaced on the way",
                    fix="write it without",
                )


# ---------------------------------------------------------------------------------------------------- cache


def _may_be_cached(node: Node) -> bool:
    """Whether an earlier result holds, as far as KFP's cache can know.

    It compares images, arguments and inputs. It does not know the hardware, nor that a registry or a folder
    of results is to be written to, nor what has become of data at the same address.
    """
    row = needs_of(node.stage)
    return not (row.hardware_bound or row.registry or row.deliver or node.config.reads_unpinned_data)
