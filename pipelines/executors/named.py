"""The executors by which `hpml run` can execute steps."""

from __future__ import annotations

from hpml.pipelines.engine.execution import Settings
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.recipe import LoadedRecipe


def open_executor(
    name: str, loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher
) -> Executor:
    """The executor `name` (process, container, kubernetes) for run `run` of a recipe.

    Raises HpmlError if it cannot be used: the workspace, the container engine, the cluster.
    """
    if name == "process":
        from hpml.pipelines.executors.process import Processes

        return Processes(settings.home, registry_uri=settings.registry_uri)
    if name == "container":
        from hpml.pipelines.executors.container import Containers

        return Containers(loaded, settings, watcher)
    from hpml.pipelines.executors.kubernetes import Jobs

    return Jobs(loaded, settings, run, watcher)
