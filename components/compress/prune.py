"""Structured pruning: whole channels are removed, so the network is smaller and faster on any runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.compress.base import Method, Network
from hpml.components.compress.prune_options import Criteria
from hpml.core.contract import Output

if TYPE_CHECKING:
    from torch import nn


class Prune(Criteria, Method):
    """Remove the least important channels. Follow it with `distill`: alone it costs much accuracy."""

    method: Literal["prune"] = "prune"

    @property
    def label(self) -> str:
        """Such as "prune50" where half of the channels are removed."""
        return f"prune{100 * self.channels:g}"

    def check(self, network: nn.Module) -> None:
        """Raise DoesNotApply for layers whose sizes the channel plan cannot say."""
        from hpml.components.compress.layers import require_prunable

        require_prunable(network)

    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The network with fewer channels. Raises ConfigInvalid if that cannot be done."""
        from hpml.components.compress.prune_channels import remove_channels

        remove_channels(network.module, network.task, self, data)
        return network
