"""By what pruning decides which channels go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.core.contract import Config


class Criteria(Config):
    """How many channels go, and which."""

    channels: float = Field(default=0.5, gt=0, lt=1)  # share removed; 0.5 leaves a quarter of the MACs
    # l1, l2: the norm of a channel's weights (Li et al. 2017, arXiv:1608.08710); taylor: how much the logits
    # change without it, estimated on training images (after Molchanov et al. 2019, arXiv:1906.10771)
    importance: Literal["taylor", "l1", "l2", "random"] = "taylor"
    ranking: Literal["uniform", "global"] = "uniform"  # a share of each layer, or one threshold
    round_to: int = Field(default=8, ge=1, le=256)  # channels left are a multiple: fewer do not fill a vector
    excluded_layers: tuple[str, ...] = ()  # keep their output channels; the network's output is always kept
    taylor_rows: int = Field(default=256, ge=1)  # training images that "taylor" looks at
    seed: int = Field(default=0, ge=0)  # of "random", and of the rows of "taylor"
