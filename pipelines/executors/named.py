"""The executors by which `hpml run` can execute steps: a function and a row each."""

from __future__ import annotations

from collections.abc import Callable

from hpml.pipelines.engine.execution import Settings
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.recipe import LoadedRecipe


def _process(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Executor:
    from hpml.pipelines.executors.process import Processes

    return Processes(settings.home, registry_uri=settings.registry_uri)


def _container(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Executor:
    from hpml.pipelines.executors.container import Containers

    return Containers(loaded, settings, watcher)


def _kubernetes(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Executor:
    from hpml.pipelines.executors.kubernetes import Jobs

    return Jobs(loaded, settings, run, watcher)


_EXECUTORS: dict[str, Callable[[LoadedRecipe, Settings, str, Watcher], Executor]] = {
    "process": _process,
    "container": _container,
    "kubernetes": _kubernetes,
}


def open_executor(
    name: str, loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher
) -> Executor:
    """The executor `name` for run `run` of a recipe.

    Raises HpmlError if it cannot be used: the workspace, the container engine, the cluster.
    """
    return _EXECUTORS[name](loaded, settings, run, watcher)
