"""What a stage needs of the machine it runs on, and what may be done with its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["cpu", "gpu", "tensorrt", "client"]


@dataclass(frozen=True)
class Needs:
    """cpus: threads a step uses, None for all there are.

    exclusive: nothing else of ours may run meanwhile, whatever its config says of that. gates: the keys
    of its config that only refuse a result, so that what it depends on are the others. preload: modules
    worth importing once, before forking. hardware_bound: the result holds for this hardware only.
    numerics_depend_on_threads: its last digits depend on how many threads share its sums, and on the
    kernels that libraries choose. registry: the result is a change in the model registry, so it is void
    when the registry is another one. deliver: the folder of the run that gets a copy of the result, for
    the user. family: which of the images in `docker/` it runs in. memory: of its container. cluster_cpus:
    how many CPUs a pod gets of a step that takes all there are. checkpoints: whether it keeps in its
    scratch what a next attempt goes on from. only_shows: its result is for the eye, so that a run in
    which it fails has still done what it was for. settable: the keys of its config that can be set for a
    single run, on the page of Kubeflow, where their names begin with settable_prefix.
    """

    cpus: int | None = 1
    exclusive: bool = False
    gates: frozenset[str] = frozenset()
    preload: tuple[str, ...] = ()
    hardware_bound: bool = False
    numerics_depend_on_threads: bool = False
    registry: bool = False
    deliver: str = ""
    family: Family = "cpu"
    memory: str = "1Gi"
    cluster_cpus: int = 2
    checkpoints: bool = False
    only_shows: bool = False
    settable: tuple[str, ...] = ()
    settable_prefix: str = ""
