"""What each stage needs of the place it runs in: one row a stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """cpus: threads a step uses, None for all there are.

    exclusive: nothing else of ours may run meanwhile. preload: modules worth importing once, before forking.
    hardware_bound: the result holds for this hardware only. registry: the result is a change in the model
    registry, so it is void when the registry is another one. deliver: the folder of the run that gets a copy
    of the result, for the user.
    """

    cpus: int | None = 1
    exclusive: bool = False
    preload: tuple[str, ...] = ()
    hardware_bound: bool = False
    registry: bool = False
    deliver: str = ""


RESOURCES: dict[str, Resources] = {
    "prepare": Resources(),
    "train": Resources(cpus=None, preload=("torch",)),
    "compress": Resources(cpus=None, preload=("torch",)),
    "export": Resources(preload=("torch",), hardware_bound=True),
    "ceilings": Resources(cpus=None, exclusive=True, preload=("torch",), hardware_bound=True),
    "benchmark": Resources(cpus=None, exclusive=True, hardware_bound=True),
    "diagnose": Resources(cpus=None, exclusive=True, preload=("torch",), hardware_bound=True),
    "report": Resources(deliver="report"),
    "select": Resources(),
    "register": Resources(registry=True),
    "deploy": Resources(deliver="bundle"),
}


def resources_of(stage: str) -> Resources:
    """The row of a stage; a stage of the user's own that has none is small and undemanding."""
    return RESOURCES.get(stage, Resources())
