"""Which channels go together and which of them go. Torch-Pruning knows the former, this file the latter.

Channels that layers share (through a residual sum, a concatenation, a flattening) can only be removed from
all of them at once: a group of the dependency graph (Fang et al. 2023, arXiv:2301.12900).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn

from components.artifacts import Artifact, DatasetSpec, InputSpec
from components.compress.layers import is_within, require_layers
from components.compress.prune import Prune
from components.compress.rows import stratified_rows
from components.contract import ConfigInvalid, HpmlError
from components.images import batches, load_split, to_x_nchw
from components.models.channel_plan import SIZES


@dataclass(frozen=True)
class Group:
    """Channels of layers that depend on each other.

    root: the layer whose output channels they are. scores: the importance of each, float (channels,).
    blocks: into how many equal blocks a grouped convolution divides the channels; all must stay equal.
    """

    root: nn.Module
    scores: Tensor
    blocks: int

    def weakest(self, kept: int) -> list[int]:
        """All channels but the `kept` most important ones, the same places in every block."""
        size = len(self.scores) // self.blocks
        order = self.scores.view(self.blocks, size).mean(dim=0).argsort(stable=True)
        removed = order[: size - kept // self.blocks].tolist()
        return sorted(place + block * size for block in range(self.blocks) for place in removed)


def remove_channels(network: nn.Module, config: Prune, spec: InputSpec, data: Artifact[DatasetSpec]) -> None:
    """Prune `network` in place.

    Raises ConfigInvalid if it holds layers that cannot be pruned, if it does not run with fewer channels, or
    if nothing can be removed.
    """
    _require_prunable(network)
    require_layers(network, config.excluded_layers, where="prune.excluded_layers")
    example = torch.zeros(1, *spec.shape_chw)
    shape = network(example).shape
    graph = _trace(network, example)
    groups = _groups(network, graph, config, _importance(network, config, spec, data))
    removed = [group.weakest(kept) for group, kept in zip(groups, _kept(groups, config), strict=True)]
    if not any(removed):
        raise ConfigInvalid(
            "prune would remove nothing",
            why=f"no layer it may touch can lose channels and keep a multiple of {config.round_to}",
            fix="lower prune.round_to or exclude fewer layers",
        )
    try:
        for group, channels in zip(groups, removed, strict=True):
            if channels:
                remove = graph.get_pruner_of_module(group.root).prune_out_channels
                graph.get_pruning_group(group.root, remove, channels).prune()
        fits = network(example).shape == shape
    except HpmlError:  # a signal's
        raise
    except Exception as error:  # whatever the network's own code raises
        raise _unprunable(error) from error
    if not fits:
        raise _unprunable(ValueError("its output has another shape"))


def _require_prunable(network: nn.Module) -> None:
    """Every number that is stored has to be in a layer whose size the channel plan can say."""
    kinds = ", ".join(kind.__name__ for kind in SIZES)
    for name, layer in network.named_modules():
        owns = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if owns and type(layer) not in SIZES:
            raise ConfigInvalid(
                f"prune cannot prune a network with {type(layer).__name__} weights"
                + (f" (layer {name!r})" if name else ""),
                why=f"it prunes networks whose weights are all in {kinds}",
                fix="leave prune out of this model's variants; quantize and distill work on any network",
            )


def _unprunable(error: Exception) -> ConfigInvalid:
    return ConfigInvalid(
        "the network does not run with fewer channels",
        why=" ".join(f"{type(error).__name__}: {error}".split())[:300],
        fix="take sizes from tensors in its forward, not from numbers, or name the layers in"
        " prune.excluded_layers",
    )


def _trace(network: nn.Module, example: Tensor) -> Any:
    try:
        return torch_pruning.DependencyGraph().build_dependency(network, example_inputs=example)
    except HpmlError:  # a signal's
        raise
    except Exception as error:  # whatever the network's own code raises
        raise _unprunable(error) from error


def _importance(network: nn.Module, config: Prune, spec: InputSpec, data: Artifact[DatasetSpec]) -> Any:
    """Torch-Pruning's scorer of a group.

    l1: Li et al. 2017 (arXiv:1608.08710), l2 the same with squares; taylor: the loss that a channel's removal
    costs to first order, Molchanov et al. 2019 (arXiv:1906.10771).
    """
    if config.importance == "random":
        return torch_pruning.importance.RandomImportance()
    if config.importance == "taylor":
        _accumulate_gradients(network, config, spec, data)
        return torch_pruning.importance.GroupTaylorImportance()
    return torch_pruning.importance.GroupMagnitudeImportance(p=1 if config.importance == "l1" else 2)


def _accumulate_gradients(
    network: nn.Module, config: Prune, spec: InputSpec, data: Artifact[DatasetSpec]
) -> None:
    rows = list(stratified_rows(data, config.taylor_rows, config.seed))
    images_nhwc, labels = load_split(data, "train")
    x, y = torch.from_numpy(to_x_nchw(images_nhwc[rows], spec)), torch.from_numpy(labels[rows])
    for part in batches(len(rows), 64):
        loss: Tensor = nn.functional.cross_entropy(network(x[part]), y[part], reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]


def _groups(network: nn.Module, graph: Any, config: Prune, importance: Any) -> list[Group]:
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
    network.zero_grad(set_to_none=True)
    return found


def _blocks(group: Any) -> int:
    """Into how many blocks the grouped convolutions in `group` divide it; depthwise ones shrink with it."""
    layers = [dep.target.module for dep, _ in group]
    return max(
        (
            layer.groups
            for layer in layers
            if isinstance(layer, nn.Conv2d) and not layer.groups == layer.in_channels == layer.out_channels
        ),
        default=1,
    )


def _kept(groups: list[Group], config: Prune) -> list[int]:
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
