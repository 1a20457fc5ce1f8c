"""Writes the pipeline down as KFP v2 IR: one container component a step. The only module that imports kfp."""

from __future__ import annotations

import importlib
import inspect
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.components.executor_input import OUT
from hpml.core.errors import ConfigInvalid
from hpml.pipelines import graph
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.kubeflow.steps import (
    KFP_RUN_LABEL,
    RUN_VARIABLE,
    Component,
    Parameter,
    components_of,
)
from hpml.pipelines.plan import trace
from hpml.pipelines.recipe import LoadedRecipe

MAX_BYTES = 128 << 10  # of the IR; more does not fit beside a run's own state into an object of the cluster

_REQUIRED_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")  # of the store's Secret
_OPTIONAL_KEYS = ("AWS_ENDPOINT_URL", "AWS_REGION")  # the cloud's own store needs none


@dataclass(frozen=True)
class Compiled:
    """A compiled pipeline.

    text: the IR, YAML. tasks: the name of each step in it. parameters: what can be set for a single run.
    """

    text: str
    tasks: Mapping[str, str]
    parameters: tuple[Parameter, ...]


def compile_pipeline(loaded: LoadedRecipe) -> Compiled:
    """The pipeline of a recipe for Kubeflow; equal recipes give equal bytes.

    Raises ConfigInvalid if kfp is not installed, if a step's config cannot be handed to Kubeflow, or if the
    pipeline is too large for it.
    """
    recipe = loaded.recipe
    plan = trace(graph.graph, recipe)
    components = components_of(plan, recipe)
    parameters = {item.name: item for component in components for item in component.parameters}
    text = _write(pods.object_name(recipe.name), components, tuple(parameters.values()), recipe.cluster)
    if len(text.encode()) > MAX_BYTES:
        raise ConfigInvalid(
            f"the compiled pipeline has {len(text.encode()) / 1024:.0f} KiB",
            why=f"Kubeflow takes {MAX_BYTES >> 10}, and its {len(components)} steps need more",
            fix="split the variants or targets over two recipes",
        )
    tasks = {component.step: component.task for component in components}
    return Compiled(text, tasks, tuple(parameters.values()))


def _write(
    name: str, components: list[Component], parameters: tuple[Parameter, ...], cluster: ClusterConfig
) -> str:
    compiler, dsl = _kfp("kfp.compiler"), _kfp("kfp.dsl")

    def pipeline(*given: Any) -> None:
        values = dict(zip((item.name for item in parameters), given, strict=True))
        tasks: dict[str, Any] = {}
        for component in components:
            arguments = {
                input_name: tasks[step].outputs[OUT] for input_name, (_, step) in component.inputs.items()
            }
            arguments |= {item.name: values[item.name] for item in component.parameters}
            task = _declare(component)(**arguments)
            tasks[component.step] = _configured(task, component, cluster)

    shape = [_parameter(item.name, item.type, default=item.default) for item in parameters]
    whole = dsl.pipeline(name=name, description="Data to a chosen, registered, deployable model.")(
        _with_signature(pipeline, name, shape)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(whole, str(file))
        return file.read_text()


def _declare(component: Component) -> Any:
    """The container component of a step; kfp reads its interface off the signature of a function."""
    dsl = _kfp("kfp.dsl")
    shape = [_parameter(name, dsl.Input[getattr(dsl, kind)]) for name, (kind, _) in component.inputs.items()]
    shape += [_parameter(item.name, item.type) for item in component.parameters]
    shape += [_parameter(name, dsl.Output[getattr(dsl, kind)]) for name, kind in component.outputs.items()]

    def container(*_places: Any) -> Any:  # which are written out in the arguments
        return dsl.ContainerSpec(
            image=component.image, command=list(component.command), args=list(component.arguments)
        )

    return dsl.container_component(_with_signature(container, component.task, shape, dsl.ContainerSpec))


def _configured(task: Any, component: Component, cluster: ClusterConfig) -> Any:
    """`task` with what its pods need and where they may run."""
    kubernetes, needs = _kfp("kfp.kubernetes"), component.needs
    assert needs.cpus and needs.memory and needs.timeout_s, "the defaults are filled in"
    task.set_display_name(component.step)
    task.set_caching_options(component.cached)
    cpus, memory = f"{needs.cpus:g}", needs.memory
    task.set_cpu_request(cpus).set_cpu_limit(cpus).set_memory_request(memory).set_memory_limit(memory)
    if needs.gpus:
        task.set_accelerator_type(cluster.gpu_resource).set_accelerator_limit(needs.gpus)
    for name, value in sorted(component.environment.items()):
        task.set_env_variable(name, value)

    kubernetes.use_field_path_as_env(task, RUN_VARIABLE, f"metadata.labels['{KFP_RUN_LABEL}']")
    for keys, optional in ((_REQUIRED_KEYS, False), (_OPTIONAL_KEYS, True)):
        kubernetes.use_secret_as_env(task, cluster.store_secret, {key: key for key in keys}, optional)
    kubernetes.set_security_context(task, run_as_user=pods.UID, run_as_group=pods.UID, run_as_non_root=True)
    kubernetes.set_timeout(task, needs.timeout_s)
    kubernetes.set_image_pull_policy(task, cluster.image_pull_policy)
    if cluster.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(cluster.image_pull_secrets))
    kubernetes.empty_dir_mount(task, "tmp", "/tmp")  # noqa: S108 - the pod's own
    if needs.gpus:  # NCCL and data loaders outgrow the 64 MB that a pod has
        size = cluster.shared_memory
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=size)  # noqa: S108
    for label, value in sorted(needs.node_selector.items()):
        kubernetes.add_node_selector(task, label, value)
    for item in needs.tolerations:
        kubernetes.add_toleration(task, **pods.toleration(item))
    if cluster.queue:
        kubernetes.add_pod_label(task, "kueue.x-k8s.io/queue-name", cluster.queue)
    return task


# ------------------------------------------------------------------------------------------------------- kfp


def _kfp(module: str) -> Any:
    """A module of kfp, which takes a second to import."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            f"the package {error.name} is not installed",
            why="compiling for Kubeflow needs it",
            fix="pip install 'hpml-pipeline[cluster]'",
        ) from None


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _with_signature(
    function: Callable[..., Any], name: str, shape: list[inspect.Parameter], returns: Any = None
) -> Callable[..., Any]:
    """`function` as if it had been written with this name and these parameters."""
    function.__name__ = function.__qualname__ = name.replace("-", "_")
    function.__signature__ = inspect.Signature(shape, return_annotation=returns)  # type: ignore[attr-defined]
    function.__annotations__ = {item.name: item.annotation for item in shape} | {"return": returns}
    return function
