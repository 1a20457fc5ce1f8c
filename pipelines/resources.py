"""What each stage needs of the place it runs in: one row a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["cpu", "gpu", "tensorrt", "client"]


@dataclass(frozen=True)
class Resources:
    """cpus: threads a step uses, None for all there are.

    exclusive: nothing else of ours may run meanwhile, whatever its config says of that. gates: the keys of
    its config that only refuse a result, so that what it depends on are the others. preload: modules worth
    importing once, before forking. hardware_bound: the result holds for this hardware only.
    rounds_by_threads: its last digits depend on how many threads share its sums, and on the kernels that
    libraries choose. registry: the result is a change in the model registry, so it is void when the registry
    is another one. deliver: the folder of the run that gets a copy of the result, for the user. family: which
    of the images in `docker/` it runs in. memory: of its container. cluster_cpus: how many CPUs a pod gets of
    a step that takes all there are. checkpoints: whether it keeps in its scratch what a next attempt goes on
    from. only_shows: its result is for the eye, so that a run in which it fails has still done what it was
    for.
    """

    cpus: int | None = 1
    exclusive: bool = False
    gates: frozenset[str] = frozenset()
    preload: tuple[str, ...] = ()
    hardware_bound: bool = False
    rounds_by_threads: bool = False
    registry: bool = False
    deliver: str = ""
    family: Family = "cpu"
    memory: str = "1Gi"
    cluster_cpus: int = 2
    checkpoints: bool = False
    only_shows: bool = False


RESOURCES: dict[str, Resources] = {
    "prepare": Resources(),
    "train": Resources(cpus=None, preload=("torch",), rounds_by_threads=True, memory="2Gi", checkpoints=True),
    "compress": Resources(
        cpus=None, preload=("torch",), rounds_by_threads=True, memory="2Gi", checkpoints=True
    ),
    "export": Resources(preload=("torch",), hardware_bound=True, memory="2Gi"),
    "peaks": Resources(
        cpus=None,
        exclusive=True,
        preload=("torch",),
        hardware_bound=True,
        memory="2Gi",
        only_shows=True,
    ),
    "benchmark": Resources(
        cpus=None,
        exclusive=True,
        gates=frozenset({"require_quiet"}),
        hardware_bound=True,
        memory="2Gi",
        checkpoints=True,
    ),
    "diagnose": Resources(
        cpus=None,
        exclusive=True,
        preload=("torch",),
        hardware_bound=True,
        memory="2Gi",
        only_shows=True,
    ),
    "report": Resources(deliver="report", only_shows=True),
    "select": Resources(),
    "register": Resources(registry=True),
    "bundle": Resources(deliver="bundle"),
}


def resources_of(stage: str) -> Resources:
    """The row of a stage; a stage of the user's own that has none is small and undemanding."""
    return RESOURCES.get(stage, Resources())
