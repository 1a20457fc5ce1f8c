"""Which methods cannot work on an architecture, told without training: python -m ...applicability < JSON.

A process of its own, because a user's architecture is a user's code, and building it needs torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.components.compress import AnyMethod, DoesNotApply, Method
from hpml.core.contract import validate
from hpml.core.errors import HpmlError
from hpml.tasks import Task, task_of


def why_not(architecture: ArchitectureSpec, task: Task, methods: Iterable[Method]) -> list[str]:
    """For each method why it does not apply to the architecture; empty where it does, or cannot be known.

    task: may be a stand-in, as which layers a network has does not depend on the data.
    """
    try:
        with torch.device("meta"):
            network = models.build(architecture, task)
    except HpmlError:  # of another kind of image, or with a mistake: training says which
        return ["" for _ in methods]
    return [_why_not(method, network) for method in methods]


def _why_not(method: Method, network: torch.nn.Module) -> str:
    try:
        method.check(network)
    except DoesNotApply as error:
        return str(error)
    return ""


def main() -> None:
    """Answer {"architecture": ..., "task": ..., "methods": [...]} with a list of reasons, one a method."""
    question = json.load(sys.stdin)
    architecture = ArchitectureSpec.model_validate(question["architecture"])
    task = task_of(question["task"])
    methods: tuple[Method, ...] = validate(tuple[AnyMethod, ...], question["methods"], where="the methods")
    print(json.dumps(why_not(architecture, task, methods)))


if __name__ == "__main__":
    main()
