"""What a destination is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Place, Say

Writer = Callable[[Deployable, DeployOptions, Path], list[str]]


@dataclass(frozen=True)
class Rollouts:
    """How releases come to a destination, beside what is served there.

    release: of a bundle, once it is where servers find it. place: of a name, in which workspace. address:
    what the destination is called in records.
    """

    release: Callable[[Deployable, DeployOptions, Say], Release]
    place: Callable[[DeployOptions, Path, Say], Place]
    address: Callable[[DeployOptions], str]


@dataclass(frozen=True)
class Destination:
    """One of the places that a bundle can be deployed to: by files, by rollouts, or by either.

    write: puts its files into a folder, and returns the commands to run there, comments among them; raises
    ConfigInvalid or UsageError for what it cannot deploy. options: those that mean something to it beside
    COMMON. runs_here: whether it is this machine that will serve, unless somebody says otherwise.
    """

    options: frozenset[str]
    write: Writer | None = None
    rollouts: Rollouts | None = None
    runs_here: bool = False


COMMON = frozenset({"name", "cpus", "unverified"})
