"""A decoder-only transformer: the architecture of LLaMA (Touvron et al. 2023, arXiv:2302.13971), any size.

RMS norms before each part (Zhang and Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), a SwiGLU MLP (Shazeer 2020, arXiv:2002.05202), no biases, one matrix for the embedding and
the head (Press and Wolf 2017, arXiv:1608.05859).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpml.tasks.language_modeling.cache import CacheShape

MOST_BLOCKS = 1000
INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0
MLP_MULTIPLE = 16  # of the MLP's width


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, sequence, dim) to the same; and keys and values, (batch, heads, positions, dim / heads).

        mask: added to the scores, (batch, 1, sequence, positions); None: causal. past: keys and values of the
        positions before, or nothing.
        """
        batch, sequence, dim = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = _rotated(q, rotary), _rotated(k, rotary)
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        if mask is None:
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # what is exported: the function above becomes twice as many nodes
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + mask
            attended = scores.softmax(dim=-1) @ v
        return self.projection(attended.transpose(1, 2).reshape(batch, sequence, dim)), k, v


class Mlp(nn.Module):
    """Two layers with a gate: silu(x gate) * (x up), then down."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, dim) to the same shape."""
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return y


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and around a shortcut."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention.forward`."""
        attended, keys, values = self.attention(self.norm1(x), rotary, mask, past)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm2(x))), keys, values


class Decoder(nn.Module):
    """A language model. dim: the width. depth: the number of blocks. hidden: of the MLP; None: 8/3 of dim.

    dropout: of embeddings, and of what each part adds, in training.
    context is what it is trained to look back; positions are relative, so no weight depends on it.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context: int,
        dim: int = 256,
        depth: int = 6,
        heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(dim, depth, heads, hidden or 1) < 1 or depth > MOST_BLOCKS:
            raise ValueError(f"sizes are from 1, and depth to {MOST_BLOCKS}; depth is {depth}")
        if dim % (2 * heads):
            raise ValueError(f"dim {dim} must be a multiple of twice the heads, {2 * heads}")
        self.context = context
        self.cache_shape = CacheShape(depth, heads, dim // heads)
        wide = hidden or math.ceil(8 * dim / 3 / MLP_MULTIPLE) * MLP_MULTIPLE
        self.embedding, self.dropout = nn.Embedding(vocabulary_size, dim), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, wide, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # What is added to the shortcuts does not grow with the depth (Radford et al. 2019, GPT-2).
                is_added = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD / (math.sqrt(2 * depth) if is_added else 1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *past: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Token ids (batch, sequence) to the logits (batch, sequence, vocabulary_size) of what follows each.

        With a mask, (batch, past + sequence) of 1 for a token and 0 for padding, it goes on after `past`, the
        keys and values of each block in turn, (batch, heads, past, dim / heads), and returns those of all
        positions after the logits.
        """
        before = past[0].shape[2] if past else 0
        places = torch.arange(before, before + input_ids.shape[1], device=input_ids.device)
        if attention_mask is None:
            mask, positions = None, places[None]
        else:
            mask = _added_mask(attention_mask, places)
            # Padding is no position: onnxruntime-genai has it behind the shorter prompts of a batch.
            positions = attention_mask.cumsum(dim=1)[:, before:] - 1
        x = self.dropout(self.embedding(input_ids))
        rotary = _rotary(positions, self.cache_shape.head_size)
        present: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x, keys, values = block(x, rotary, mask, past[2 * number : 2 * number + 2])
            present += [keys, values]
        logits: Tensor = self.head(self.norm(x))
        return logits if attention_mask is None else (logits, *present)


def _rotary(positions: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of each position (rows, sequence): (rows, 1, sequence, head_size)."""
    places = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * ROTARY_BASE ** (-places / head_size)
    angles = torch.cat([angles, angles], dim=3)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def _added_mask(attention_mask: Tensor, places: Tensor) -> Tensor:
    """0 where a place may look, else the lowest number: all of them, where padding looks, is no NaN."""
    keys = torch.arange(attention_mask.shape[1], device=places.device)
    may_look = (keys <= places[:, None]) & attention_mask[:, None, :].bool()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(may_look.shape, device=places.device).masked_fill(~may_look, lowest)[:, None]
