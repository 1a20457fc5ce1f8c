"""Which channels go together and which of them go. Torch-Pruning knows the former, this file the latter.

Channels that layers share (through a residual sum, a concatenation, a flattening) can only be removed from
all of them at once: a group of the dependency graph (Fang et al. 2023, arXiv:2301.12900).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.compress.base import DoesNotApply
from hpml.components.compress.layers import is_within, require_layers, require_prunable
from hpml.components.compress.prune_options import Criteria
from hpml.core.batches import batches
from hpml.core.errors import ConfigInvalid
from hpml.models.channel_plan import SIZES
from hpml.tasks import Task
from hpml.tasks.judging import rows_of
from hpml.tasks.users_code import users_code

Scorer = Callable[[Any], Tensor]  # the importance of the channels of a group of Torch-Pruning


@dataclass(frozen=True)
class Group:
    """Channels of layers that depend on each other.

    root: the layer whose output channels they are. scores: the importance of each, float (channels,).
    blocks: into how many equal blocks a grouped convolution divides the channels; all must stay equal.
    """

    root: nn.Module
    scores: Tensor
    blocks: int

    def least_important(self, kept: int) -> list[int]:
        """All channels but the `kept` most important ones, the same places in every block."""
        size = len(self.scores) // self.blocks
        order = self.scores.view(self.blocks, size).mean(dim=0).argsort(stable=True)
        removed = order[: size - kept // self.blocks].tolist()
        return sorted(place + block * size for block in range(self.blocks) for place in removed)


def remove_channels(network: nn.Module, task: Task, config: Criteria, data: Artifact[DatasetSpec]) -> None:
    """Prune `network` in place.

    Raises DoesNotApply if it holds layers that cannot be pruned or does not run with fewer channels, and
    ConfigInvalid if nothing can be removed.
    """
    require_prunable(network)
    require_layers(network, config.excluded_layers, where="prune.excluded_layers")
    example = task.example(1)
    shapes = _shapes(network(*example))
    with _foreign_code():
        graph = torch_pruning.DependencyGraph().build_dependency(network, example_inputs=example)
    groups = _groups(network, graph, config, _importance(network, graph, config, task, data))
    removed = [group.least_important(kept) for group, kept in zip(groups, _kept(groups, config), strict=True)]
    if not any(removed):
        raise ConfigInvalid(
            "prune would remove nothing",
            why=f"no layer it may touch can lose channels and keep a multiple of {config.round_to}",
            fix="lower prune.round_to or exclude fewer layers",
        )
    with _foreign_code():
        for group, channels in zip(groups, removed, strict=True):
            if channels:
                remove = graph.get_pruner_of_module(group.root).prune_out_channels
                graph.get_pruning_group(group.root, remove, channels).prune()
        if _shapes(network(*example)) != shapes:
            raise ValueError("its output has another shape")


def _shapes(outputs: Tensor | tuple[Tensor, ...]) -> list[torch.Size]:
    return [tensor.shape for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _foreign_code() -> AbstractContextManager[None]:
    """What Torch-Pruning and the network's own code raise as DoesNotApply."""
    return users_code(
        "the network does not run with fewer channels",
        fix="take sizes from tensors in its forward, not from numbers, or name the layers in"
        " prune.excluded_layers",
        kind=DoesNotApply,
    )


def _importance(
    network: nn.Module, graph: Any, config: Criteria, task: Task, data: Artifact[DatasetSpec]
) -> Scorer:
    """What scores the channels of a group, float (channels,)."""
    if config.importance == "taylor":
        return _taylor_importance(graph, _output_changes(network, config, task, data))
    score: Scorer = torch_pruning.importance.RandomImportance()
    if config.importance != "random":
        score = torch_pruning.importance.GroupMagnitudeImportance(p=1 if config.importance == "l1" else 2)
    return score


def _taylor_importance(graph: Any, changes: dict[nn.Module, Tensor]) -> Scorer:
    """Adds up the changes over the layers that write a channel."""

    def score(group: Any) -> Tensor:
        scores = torch.zeros(len(group[0].idxs))
        for item in group:
            change = changes.get(item.dep.target.module)
            if change is not None and graph.is_out_channel_pruning_fn(item.dep.handler):
                scores.index_add_(0, torch.tensor(item.root_idxs), change[item.idxs])
        return scores

    return score


def _output_changes(
    network: nn.Module, config: Criteria, task: Task, data: Artifact[DatasetSpec]
) -> dict[nn.Module, Tensor]:
    """By layer, the squared change of the outputs without each of its channels, to first order, over rows.

    The gates of Molchanov et al. 2019 (arXiv:1906.10771), on the outputs in place of the loss, whose gradient
    all but vanishes in a trained network. A random projection per row makes one backward pass enough.
    """
    changes: dict[nn.Module, Tensor] = {}

    def after(layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        values = output.detach().clone()  # what follows may work in place

        def add(gradient: Tensor) -> None:
            by_gate = (gradient * values).reshape(*values.shape[:2], -1).sum(dim=2)
            changes[layer] = changes.get(layer, torch.zeros(())) + by_gate.square().sum(dim=0)

        output.register_hook(add)  # type: ignore[no-untyped-call]

    hooks = [layer.register_forward_hook(after) for layer in network.modules() if type(layer) in SIZES]
    rows = task.calibration_rows(data, config.taylor_rows, config.seed)
    stored = task.stored(data, "train")
    random = torch.Generator().manual_seed(config.seed)
    for part in batches(len(rows), 64):
        arrays = rows_of(stored, rows[part])
        features = task.training_features({name: torch.from_numpy(array) for name, array in arrays.items()})
        for tensor in features:
            if tensor.is_floating_point():
                tensor.requires_grad_()  # layers that the user froze have gates, too
        outputs = network(*features)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.randn(output.shape, generator=random) for output in outputs])
    for hook in hooks:
        hook.remove()
    network.zero_grad(set_to_none=True)
    return changes


def _groups(network: nn.Module, graph: Any, config: Criteria, importance: Scorer) -> list[Group]:
    """The groups that may lose channels: not those of the network's output, nor of excluded layers."""
    excluded = {layer for name, layer in network.named_modules() if is_within(name, config.excluded_layers)}
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for group in graph.get_all_groups():
            loses = [dep.target for dep, _ in group if graph.is_out_channel_pruning_fn(dep.handler)]
            if any(node.module in excluded or not node.outputs for node in loses):
                continue
            scores = importance(group).detach()
            found.append(Group(group[0].dep.target.module, scores, _blocks(group)))
    return found


def _blocks(group: Any) -> int:
    """Into how many blocks the grouped convolutions in `group` divide it; depthwise ones shrink with it."""
    layers = [dep.target.module for dep, _ in group if isinstance(dep.target.module, nn.Conv2d)]
    return max(
        (one.groups for one in layers if not one.groups == one.in_channels == one.out_channels), default=1
    )


def _kept(groups: list[Group], config: Criteria) -> list[int]:
    """How many channels each group keeps: a multiple of `round_to` and of its blocks, never none."""
    share = 1 - config.channels
    if config.ranking == "uniform":
        wanted = [share * len(group.scores) for group in groups]
    else:
        everyone = torch.cat([group.scores for group in groups]).sort(descending=True).values
        threshold = everyone[max(1, round(share * len(everyone))) - 1]
        wanted = [float((group.scores >= threshold).sum()) for group in groups]
    return [
        _rounded(count, len(group.scores), math.lcm(config.round_to, group.blocks))
        for count, group in zip(wanted, groups, strict=True)
    ]


def _rounded(wanted: float, available: int, step: int) -> int:
    return min(available, max(1, round(wanted / step)) * step)
