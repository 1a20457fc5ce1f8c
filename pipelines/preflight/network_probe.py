"""Builds the network of a recipe and says what is wrong with it: python -m ...network_probe < JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpml.core.errors import HpmlError, StageFailed
from hpml.pipelines.preflight.asking import ask

_MODULE = "hpml.pipelines.preflight.network_probe"
_TIMEOUT_S = 600.0  # the network's own limits are below it


@dataclass(frozen=True)
class Found:
    """weights: how many numbers they are. widest: how many numbers the largest output of a layer has for one
    image; 0 if not known. problem: why it cannot be trained; empty if it can.

    not_checked: why nothing can be told here.
    """

    weights: int = 0
    widest: int = 0
    problem: str = ""
    not_checked: str = ""


def probe(
    architecture: dict[str, Any],
    shape_chw: tuple[int, ...] | None,
    classes: int,
    import_paths: tuple[str, ...],
    weights: Path | None = None,
    *,
    trains: bool,
) -> Found:
    """What a process finds that builds the network and, where the shape is known, shows it two images.

    weights: a file whose header has to fit the network; where the shape is unknown, to be safetensors.
    trains: whether the network is trained at all, so that it needs a weight that is not frozen.
    """
    question = {
        "architecture": architecture,
        "shape_chw": shape_chw,
        "classes": classes,
        "weights": str(weights) if weights else None,
        "trains": trains,
    }
    try:
        return Found(**ask(_MODULE, question, import_paths, timeout_s=_TIMEOUT_S))
    except (StageFailed, TypeError) as error:
        return Found(problem=f"building the network {error}")


def _examine(question: dict[str, Any]) -> Found:
    try:
        from hpml import models
        from hpml.artifacts.model import ArchitectureSpec
        from hpml.artifacts.model_input import InputSpec
        from hpml.components.train.local import check_shapes
        from hpml.training.loop import require_trainable
        from hpml.training.weights import check_fit, layout
    except ModuleNotFoundError as error:
        return Found(not_checked=f"{error.name} is not installed here")
    spec = ArchitectureSpec.model_validate(question["architecture"])
    shape_chw, classes = question["shape_chw"], question["classes"]
    weights = Path(question["weights"]) if question["weights"] else None
    try:
        found = layout(weights, weights) if weights else None
        model = models.build(spec, in_channels=shape_chw[0] if shape_chw else 3, num_classes=classes)
        if question["trains"]:
            require_trainable(model)
        numbers_per_image = [0]
        if shape_chw:

            def look(_module: Any, _inputs: Any, output: Any) -> None:
                if hasattr(output, "numel") and output.dim() and len(output):
                    numbers_per_image.append(output.numel() // len(output))

            for module in model.modules():
                module.register_forward_hook(look)
            ones = (1.0,) * shape_chw[0]
            images = InputSpec(shape_chw=tuple(shape_chw), mean=ones, std=ones)
            check_shapes(model, images, classes, spec.name)
            if weights and found is not None:
                check_fit(found, model.state_dict(), weights)
        return Found(weights=_count(model), widest=max(numbers_per_image))
    except HpmlError as error:
        return Found(problem=str(error))
    except Exception as error:  # lack of memory, or of what a user's code asks for
        return Found(problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _count(model: Any) -> int:
    from torch.nn.parameter import is_lazy

    tensors = list(model.parameters())
    return 0 if any(map(is_lazy, tensors)) else sum(tensor.numel() for tensor in tensors)


def main() -> None:
    """Answer the question on stdin with a line of JSON on stdout."""
    from hpml.core import memory

    memory.limit_process()
    found = _examine(json.load(sys.stdin))
    print(f"\n{json.dumps(asdict(found))}", flush=True)
    os._exit(0)  # whatever threads the user's code has started


if __name__ == "__main__":
    main()
