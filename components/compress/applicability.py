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

# Which layers a network has does not depend on these, and the data is not read yet.
_IN_CHANNELS, _CLASSES = 3, 10


def why_not(architecture: ArchitectureSpec, methods: Iterable[Method]) -> list[str]:
    """For each method why it does not apply to the architecture; empty where it does, or cannot be known."""
    try:
        with torch.device("meta"):
            network = models.build(architecture, in_channels=_IN_CHANNELS, num_classes=_CLASSES)
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
    """Answer {"architecture": ..., "methods": [...]} with a list of reasons, one a method."""
    question = json.load(sys.stdin)
    architecture = ArchitectureSpec.model_validate(question["architecture"])
    methods: tuple[Method, ...] = validate(tuple[AnyMethod, ...], question["methods"], where="the methods")
    print(json.dumps(why_not(architecture, methods)))


if __name__ == "__main__":
    main()
