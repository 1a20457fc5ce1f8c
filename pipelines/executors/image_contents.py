"""What a recipe's network needs of the images in which its steps run, said before any of them starts."""

from __future__ import annotations

from hpml import models
from hpml.core.errors import ConfigInvalid
from hpml.pipelines.engine import cache_keys
from hpml.pipelines.engine.cache_keys import RuntimeEnvironment
from hpml.pipelines.plan import Node
from hpml.pipelines.recipe import Recipe


def require_architecture(recipe: Recipe, node: Node, image: str, holds: RuntimeEnvironment) -> None:
    """Raise ConfigInvalid if `image`, which holds `holds`, cannot build the network that a step builds."""
    package = models.EXTRAS.get(recipe.train.model.architecture)
    if package and cache_keys.builds_networks(node) and not holds.version(package):
        raise ConfigInvalid(
            f"the image {image} cannot run {node.name}",
            why=f"it does not hold {package}, which is in no image unless it is put in",
            fix=how_to_build(package),
        )


def how_to_build(package: str) -> str:
    """How images come to hold the package of an extra."""
    return f"--extra {package} in docker/lock, then make lock images, puts it in; see docker/README.md"
