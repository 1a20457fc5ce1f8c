"""The places where `hpml run` can execute steps: one function a place, one row here."""

from __future__ import annotations

from collections.abc import Callable

from hpml.pipelines.engine.execution import Settings
from hpml.pipelines.executors.base import Place, Watcher
from hpml.pipelines.recipe import LoadedRecipe


def _process(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Place:
    from hpml.pipelines.executors.process import Processes

    return Processes(settings.home, registry_uri=settings.registry_uri)


def _container(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Place:
    from hpml.pipelines.executors.container import Containers

    return Containers(loaded, settings, watcher)


def _kubernetes(loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Place:
    from hpml.pipelines.executors.kubernetes import Jobs

    return Jobs(loaded, settings, run, watcher)


_PLACES: dict[str, Callable[[LoadedRecipe, Settings, str, Watcher], Place]] = {
    "process": _process,
    "container": _container,
    "kubernetes": _kubernetes,
}


def open_place(name: str, loaded: LoadedRecipe, settings: Settings, run: str, watcher: Watcher) -> Place:
    """The place `name` for run `run` of a recipe.

    Raises HpmlError if it cannot be used: the workspace, the container engine, the cluster.
    """
    return _PLACES[name](loaded, settings, run, watcher)
