"""A small pre-norm transformer with a cached decoder (Vaswani et al. 2017, arXiv:1706.03762)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpml.artifacts.operation import TensorSpec
from hpml.models.sequence_to_sequence import PADDING, SequenceToSequenceNetwork

MOST_BLOCKS = 1000


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and around a shortcut."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.projection = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def keys_values(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, tokens, dim) to keys and values, each (batch, heads, tokens, dim / heads)."""
        key, value = self.key_value(normed).chunk(2, dim=-1)
        return self._of_heads(key), self._of_heads(value)

    def attend(self, x: Tensor, normed: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """`x` (batch, tokens, dim) after attention through `mask` (batch, 1, tokens or 1, keys) and MLP."""
        attended = functional.scaled_dot_product_attention(
            self._of_heads(self.query(normed)), key, value, attn_mask=mask
        )
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y

    def _of_heads(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        return x.reshape(batch, tokens, self.heads, dim // self.heads).transpose(1, 2)


class Encoder(nn.Module):
    """Blocks over the source; at the end, what each block of the decoder is to know of it."""

    def __init__(
        self,
        embedding: nn.Embedding,
        tokens: int,
        blocks: int,
        decoder_blocks: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        dim = embedding.embedding_dim
        self.embedding, self.position = embedding, nn.Embedding(tokens, dim)
        nn.init.normal_(self.position.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.heads = heads
        self.memories = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(decoder_blocks))

    def forward(self, source_ids: Tensor) -> tuple[Tensor, ...]:
        """(batch, source) to where that is no padding (batch, source), and keys and values for each block of
        the decoder, (batch, heads, source, dim / heads)."""
        mask = source_ids != PADDING
        places = torch.arange(source_ids.shape[1], device=source_ids.device)
        x = self.dropout(self.embedding(source_ids) + self.position(places))
        for block in self.blocks:
            assert isinstance(block, Block)
            normed = block.norm1(x)
            x = block.attend(x, normed, *block.keys_values(normed), mask[:, None, None])
        x = self.norm(x)
        batch, tokens, dim = x.shape
        remembered = [
            part.reshape(batch, tokens, self.heads, dim // self.heads).transpose(1, 2)
            for memory in self.memories
            for part in memory(x).chunk(2, dim=-1)
        ]
        return mask, *remembered


class Decoder(nn.Module):
    """Blocks over the target, each of which attends at once to the source and to the target so far."""

    def __init__(self, embedding: nn.Embedding, tokens: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        dim = embedding.embedding_dim
        self.embedding, self.position = embedding, nn.Embedding(tokens, dim)
        nn.init.normal_(self.position.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, embedding.num_embeddings)

    def forward(self, input_ids: Tensor, source_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Logits (batch, target, vocabulary) after each of `input_ids` (batch, target), and the keys and
        values of `past` with those of these ids behind them."""
        steps = input_ids.shape[1]
        before = past[0].shape[2] - source_mask.shape[1]  # ids that were given earlier
        places = before + torch.arange(steps, device=input_ids.device)
        known = torch.arange(before + steps, device=input_ids.device)
        of_target = (known[None] <= places[:, None]).expand(input_ids.shape[0], 1, -1, -1)
        of_source = source_mask[:, None, None].expand(-1, -1, steps, -1)
        mask = torch.cat([of_source, of_target], dim=-1)
        x = self.dropout(self.embedding(input_ids) + self.position(places))
        present: list[Tensor] = []
        for block, past_key, past_value in zip(self.blocks, past[::2], past[1::2], strict=True):
            assert isinstance(block, Block)
            normed = block.norm1(x)
            key, value = block.keys_values(normed)
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
            present += [key, value]
            x = block.attend(x, normed, key, value, mask)
        return self.head(self.norm(x)), *present


class EncoderDecoder(SequenceToSequenceNetwork):
    """A transformer whose decoder has one attention over source and target together (merged attention; Zhang
    et al. 2019, arXiv:1908.11365): so each of its blocks has one cache, which begins with the source.

    dim: of the vectors. depth: blocks of the encoder and of the decoder, each.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        source_tokens: int,
        target_tokens: int,
        dim: int = 192,
        depth: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if min(dim, depth, heads) < 1 or depth > MOST_BLOCKS or dim % heads:
            raise ValueError(
                f"sizes are from 1, depth to {MOST_BLOCKS}, and dim {dim} is a multiple of heads {heads}"
            )
        table = nn.Embedding(vocabulary_size, dim)
        nn.init.normal_(table.weight, std=0.02)
        self.encoder = Encoder(table, source_tokens, depth, depth, heads, dropout)
        self.decoder = Decoder(table, target_tokens, depth, heads, dropout)

        def caches(when: str, length: str, content: str) -> tuple[TensorSpec, ...]:
            shape = ("batch", heads, length, dim // heads)
            return tuple(
                TensorSpec(name=f"{when}.{block}.{kind}", shape=shape, content=content)
                for block in range(depth)
                for kind in ("key", "value")
            )

        source_mask = TensorSpec(
            name="source_mask",
            dtype="bool",
            shape=("batch", "source"),
            content="true for an id, false for padding",
        )
        self.encoded = (source_mask, *caches("past", "source + past", "of the source and the ids before"))
        self.present = caches("present", "source + past + target", "with the ids: past of the next")
