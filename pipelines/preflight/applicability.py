"""Which variants of a recipe cannot be built, said before anything is trained."""

from __future__ import annotations

from hpml.components.compress import Method
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.pipelines.engine.execution import Settings, forecast
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.plan import Plan
from hpml.pipelines.preflight.asking import ask
from hpml.pipelines.recipe import LoadedRecipe

_TIMEOUT_S = 120.0


def tell(loaded: LoadedRecipe, plan: Plan, settings: Settings, executor: Executor, watcher: Watcher) -> None:
    """Say which variants of a run cannot be built, before it trains.

    Nothing is said where no method is still to be applied: what was made then is in the store. Raises
    ConfigInvalid if no variant is left.
    """
    upto = Plan({n: node for n, node in plan.nodes.items() if node.stage in ("prepare", "train", "compress")})
    cached = {item.step for item in forecast(upto, settings, executor) if item.outcome == "cached"}
    if any(node.stage == "compress" for name, node in upto.nodes.items() if name not in cached):
        warn(loaded, watcher)


def warn(loaded: LoadedRecipe, watcher: Watcher) -> None:
    """Say which variants of a recipe cannot be built. Raises ConfigInvalid if no variant is left."""
    reasons = unbuildable(loaded)
    if set(reasons) == set(loaded.recipe.variants):
        raise ConfigInvalid(
            "none of the recipe's variants can be built", why="; ".join(dict.fromkeys(reasons.values()))
        )
    for variant, reason in reasons.items():
        watcher.say(f"variant {variant} will not be built, the others will: {reason}")


def unbuildable(loaded: LoadedRecipe) -> dict[str, str]:
    """The variants with a method that does not apply to the recipe's network, and why.

    A variant that is not named may still turn out not to be built: some of it shows on the trained network
    only, and nothing can be told where torch is not installed, the network cannot be built or is elsewhere,
    or the task is a user's own.
    """
    recipe = loaded.recipe
    picky = {
        method.model_dump_json(): method
        for methods in recipe.variants.values()
        for method in methods
        if type(method).check is not Method.check
    }
    stand_in = recipe.data.stand_in()
    if not picky or stand_in is None:
        return {}
    try:
        architecture = recipe.train.known_architecture()
    except ConfigInvalid:  # training says why
        return {}
    if architecture is None:
        return {}
    question = {
        "architecture": architecture.model_dump(mode="json"),
        "task": stand_in.model_dump(mode="json"),
        "methods": [method.model_dump(mode="json") for method in picky.values()],
    }
    module = "hpml.components.compress.applicability"
    try:
        answer = ask(module, question, loaded.import_paths, timeout_s=_TIMEOUT_S)
        reason_of = dict(zip(picky, answer, strict=True))
    except (OSError, StageFailed, ValueError, TypeError):
        return {}
    reasons = {
        variant: [reason for method in methods if (reason := reason_of.get(method.model_dump_json()))]
        for variant, methods in recipe.variants.items()
    }
    return {variant: found[0] for variant, found in reasons.items() if found}
