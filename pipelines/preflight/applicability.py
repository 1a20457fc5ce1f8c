"""Which variants of a recipe cannot be built, said before anything is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from hpml.components.compress import Method
from hpml.core.errors import ConfigInvalid
from hpml.pipelines.engine.execution import Settings, forecast
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.plan import Plan
from hpml.pipelines.recipe import LoadedRecipe

_TIMEOUT_S = 120.0


def tell(loaded: LoadedRecipe, plan: Plan, settings: Settings, executor: Executor, watcher: Watcher) -> None:
    """Say which variants of a run cannot be built, before it trains.

    Nothing is said where no method is still to be applied: what was made then is in the store. Raises
    ConfigInvalid if no variant is left.
    """
    upto = Plan({n: node for n, node in plan.nodes.items() if node.stage in ("prepare", "train", "compress")})
    cached = {item.step for item in forecast(upto, settings, executor) if item.outcome == "cached"}
    if not all(name in cached for name, node in upto.nodes.items() if node.stage == "compress"):
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
    only, and nothing can be told where torch is not installed or the network cannot be built.
    """
    recipe = loaded.recipe
    picky = {
        method.model_dump_json(): method
        for methods in recipe.variants.values()
        for method in methods
        if type(method).check is not Method.check
    }
    if not picky:
        return {}
    model = recipe.train.model
    question = {
        "architecture": {"name": model.architecture, "arguments": model.arguments},
        "methods": [method.model_dump(mode="json") for method in picky.values()],
    }
    reason_of = dict(zip(picky, _asked(question, loaded.import_paths) or [""] * len(picky), strict=True))
    reasons = {
        variant: next(filter(None, (reason_of.get(method.model_dump_json()) for method in methods)), None)
        for variant, methods in recipe.variants.items()
    }
    return {variant: reason for variant, reason in reasons.items() if reason}


def _asked(question: dict[str, Any], import_paths: tuple[str, ...]) -> list[str] | None:
    """What hpml.components.compress.applicability answers; None if it does not."""
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "hpml.components.compress.applicability"],
            input=json.dumps(question),
            env={**os.environ, "HPML_IMPORT_PATHS": os.pathsep.join(import_paths)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        reasons: list[str] = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return reasons if len(reasons) == len(question["methods"]) else None
