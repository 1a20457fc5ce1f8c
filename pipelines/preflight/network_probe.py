"""Builds the network of a recipe and says what is wrong with it: python -m ...network_probe < JSON."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from hpml.artifacts.model import ArchitectureSpec
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed
from hpml.models.arguments import require_types
from hpml.pipelines.preflight.asking import ask
from hpml.tasks import Prediction, Task, task_class, task_of
from hpml.tasks.metric import Limits

# What is known of the data: all; what some of the rows tell; nothing, so that facts are made up.
Facts = Literal["known", "guess", "stand_in"]

_MODULE = "hpml.pipelines.preflight.network_probe"
_TIMEOUT_S = 600.0  # the network's own limits are below it


@dataclass(frozen=True)
class Found:
    """weights: how many numbers they are. largest_graph: how many the largest of its exported parts has.
    widest: how many numbers the largest output of a layer has for one row. Each is 0 if not known.
    metrics: the task's, by name; empty if not known. problem: why the network cannot be trained; empty if it
    can. doubt: why perhaps not, which depends on the data.

    not_checked: why nothing can be told here.
    """

    weights: int = 0
    largest_graph: int = 0
    widest: int = 0
    metrics: Mapping[str, Limits] = field(default_factory=dict)
    problem: str = ""
    doubt: str = ""
    not_checked: str = ""


def probe(
    architecture: dict[str, Any] | None,
    task: dict[str, Any],
    import_paths: tuple[str, ...],
    weights: Path | None = None,
    *,
    facts: Facts,
    trains: bool,
) -> Found:
    """What a process finds that builds the network and, where there are data to tell of, shows it two rows.

    architecture: None where only the metrics of the task are asked for. task: as in a manifest; of a user's
    own whose facts are not known, its import path alone: then the network is only built if the task gives it
    nothing of the data, and else its arguments held against its signature. weights: a file whose header has
    to fit the network; with a stand-in, to be safetensors. trains: whether the network is trained at all, so
    that it needs a weight that is not frozen.
    """
    question = {
        "architecture": architecture,
        "task": task,
        "facts": facts,
        "weights": str(weights) if weights else None,
        "trains": trains,
    }
    try:
        answer = ask(_MODULE, question, import_paths, timeout_s=_TIMEOUT_S)
        metrics = {name: Limits(**limits) for name, limits in answer["metrics"].items()}
        return Found(**{**answer, "metrics": metrics})
    except (StageFailed, TypeError, KeyError) as error:
        return Found(problem=f"building the network {error}")


def _examine(question: dict[str, Any]) -> Found:
    try:
        from hpml import models
        from hpml.components.train.local import check_shapes
        from hpml.training.loop import require_trainable
        from hpml.training.weights import check_fit, layout
    except ModuleNotFoundError as error:
        return Found(not_checked=f"{error.name} is not installed here")
    weights = Path(question["weights"]) if question["weights"] else None
    fields, facts = question["task"], question["facts"]
    metrics: dict[str, Limits] = {}
    is_sure = True
    try:
        header = layout(weights, weights) if weights else None
        kind = task_class(fields["task"])
        metrics = {metric.name: metric.limits for metric in kind.metrics}
        if question["architecture"] is None:
            return Found(metrics=metrics)
        spec = ArchitectureSpec.model_validate(question["architecture"])
        task = None if ":" in fields["task"] and facts == "stand_in" else task_of(fields)
        of_data = task.model_arguments() if task else _without_facts(kind)
        _check_arguments(spec, of_data)
        if of_data is None:
            return Found(metrics=metrics)
        is_sure = facts == "known" or task is None or spec.name in models.ARCHITECTURES
        model = models.build_of(spec, of_data)
        if question["trains"]:
            require_trainable(model)
        numbers_per_row = [0]
        if task and facts != "stand_in":
            is_sure = facts == "known"

            def look(_module: Any, _inputs: Any, output: Any) -> None:
                if hasattr(output, "numel") and output.dim() and len(output):
                    numbers_per_row.append(output.numel() // len(output))

            for module in model.modules():
                module.register_forward_hook(look)
            check_shapes(model, task, spec.name)
        if weights and header is not None and facts == "known":
            check_fit(header, model.state_dict(), weights)
        graphs = task.graphs(model).values() if task else (model,)
        return Found(
            weights=_count(model),
            largest_graph=max(map(_count, graphs)),
            widest=max(numbers_per_row),
            metrics=metrics,
        )
    except HpmlError as error:
        why = str(error)
    except Exception as error:  # lack of memory, or of what a user's code asks for
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Found(metrics=metrics, problem=why) if is_sure else Found(metrics=metrics, doubt=why)


def _without_facts(kind: type[Task]) -> dict[str, JsonValue] | None:
    """What a user's task gives its network of data that are not known yet; None if they have to be."""
    return {} if kind.model_arguments is Prediction.model_arguments else None


def _check_arguments(architecture: ArchitectureSpec, of_data: dict[str, JsonValue] | None) -> None:
    """Raises ConfigInvalid if the callable takes no such arguments, by their names and types.

    of_data: what it is given beside its own; None if that is not known.
    """
    from hpml import models

    path, make_network = models.import_path(architecture.name), models.factory(architecture.name)
    try:
        signature = inspect.signature(make_network)
    except (TypeError, ValueError):  # some callables, such as of C, do not tell it: building shows the rest
        return
    bind = signature.bind_partial if of_data is None else signature.bind
    try:
        bind(**(of_data or {}), **architecture.arguments)
    except TypeError as error:
        raise ConfigInvalid(
            f"the model {path!r} does not take its arguments",
            why=str(error),
            fix=f"it takes {', '.join(signature.parameters)}; {_given(of_data)}",
        ) from None
    require_types(path, make_network, architecture.arguments)


def _given(of_data: dict[str, JsonValue] | None) -> str:
    if of_data is None:
        return "the task gives it some of them"
    return f"the data give it {', '.join(of_data) or 'none of them'}"


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
