"""Structured pruning: whole channels are removed, so the network is smaller and faster on any runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from components.artifacts import Artifact, DatasetSpec
from components.compress.base import Method, Network
from components.contract import Output

if TYPE_CHECKING:
    from torch import nn


class Prune(Method):
    """Remove the least important channels. Follow it with `distill`: alone it costs much accuracy."""

    method: Literal["prune"] = "prune"
    channels: float = Field(default=0.5, gt=0, lt=1)  # share removed; 0.5 leaves a quarter of the MACs
    # l1, l2: the norm of a channel's weights (Li et al. 2017, arXiv:1608.08710); taylor: how much the logits
    # change without it, estimated on training images (after Molchanov et al. 2019, arXiv:1906.10771)
    importance: Literal["taylor", "l1", "l2", "random"] = "taylor"
    ranking: Literal["uniform", "global"] = "uniform"  # the same share of each layer, or where it hurts least
    round_to: int = Field(default=8, ge=1, le=256)  # channels left are a multiple: fewer do not fill a vector
    excluded_layers: tuple[str, ...] = ()  # keep their output channels; the network's output is always kept
    taylor_rows: int = Field(default=256, ge=1)  # training images that "taylor" looks at
    seed: int = Field(default=0, ge=0)  # of "random", and of the rows of "taylor"

    @property
    def label(self) -> str:
        """Such as "prune50" where half of the channels are removed."""
        return f"prune{100 * self.channels:g}"

    def check(self, network: nn.Module) -> None:
        """Raise DoesNotApply for layers whose sizes the channel plan cannot say."""
        from components.compress.layers import require_prunable

        require_prunable(network)

    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The network with fewer channels. Raises ConfigInvalid if that cannot be done."""
        from components.compress.channels import remove_channels

        remove_channels(network.module, self, network.input, data)
        return network
