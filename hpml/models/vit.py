"""A small vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929), pre-norm, mean-pooled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_BLOCKS = 1000


class Block(nn.Module):
    """Self-attention and an MLP, each behind a layer norm and around a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same shape."""
        batch, tokens, dim = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .reshape(batch, tokens, 3, self.heads, dim // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, dim))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Vit(nn.Module):
    """A vision transformer for square images of side `image_size`, cut into squares of side `patch`.

    Patches, position embedding, `depth` blocks, mean over the tokens, linear head.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        image_size: int = 32,
        patch: int = 4,
        dim: int = 128,
        depth: int = 6,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if min(image_size, patch, dim, depth, heads) < 1 or depth > MOST_BLOCKS:
            raise ValueError(f"sizes are from 1, and depth to {MOST_BLOCKS}; depth is {depth}")
        if image_size % patch or dim % heads:
            raise ValueError(
                f"image_size {image_size} must be a multiple of patch {patch}, dim {dim} of heads {heads}"
            )
        self.patches = nn.Conv2d(in_channels, dim, patch, patch)
        self.position = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_channels, image_size, image_size) to logits (batch, num_classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits
