"""The classic chatbot: recurrent encoder and decoder with attention (Luong et al. 2015, arXiv:1508.04025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpml.artifacts.operation import TensorSpec
from hpml.models.recurrent import Gru
from hpml.models.sequence_to_sequence import PADDING, SequenceToSequenceNetwork


class Encoder(nn.Module):
    """A bidirectional GRU over the source."""

    def __init__(self, embedding: nn.Embedding, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.dropout = embedding, nn.Dropout(dropout)
        self.gru = Gru(embedding.embedding_dim, hidden // 2, directions=2)
        self.bridge = nn.Linear(hidden, hidden)

    def forward(self, source_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, source) to what is remembered of it (batch, source, hidden), where that is none of the
        padding (batch, source), and the state that the decoder begins with (batch, hidden)."""
        mask = source_ids != PADDING
        embedded = self.dropout(self.embedding(source_ids))
        memory, last = self.gru(embedded, lengths=mask.sum(dim=1, dtype=torch.int32))
        return memory, mask, torch.tanh(self.bridge(last))


class Decoder(nn.Module):
    """A GRU whose outputs attend to what the encoder remembers, by the score that the paper calls general."""

    def __init__(self, embedding: nn.Embedding, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.dropout = embedding, nn.Dropout(dropout)
        self.gru = Gru(embedding.embedding_dim, hidden)
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, embedding.num_embeddings)

    def forward(
        self, input_ids: Tensor, memory: Tensor, mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits (batch, target, vocabulary) after each of `input_ids` (batch, target), and the new state."""
        outputs, last = self.gru(self.dropout(self.embedding(input_ids)), start=state)
        scores = self.score(outputs) @ memory.transpose(1, 2)
        attention = scores.masked_fill(~mask[:, None], -1e4).softmax(dim=-1)
        attended = torch.tanh(self.combine(torch.cat([attention @ memory, outputs], dim=-1)))
        return self.head(self.dropout(attended)), last


class GruAttention(SequenceToSequenceNetwork):
    """One layer each way; what is attended to goes into the output, not into the next step, so that a whole
    target is computed in one pass.

    embedding, hidden: sizes of the vectors of ids, and of the states. dropout: of embeddings and outputs.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        source_tokens: int,
        target_tokens: int,
        embedding: int = 192,
        hidden: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if min(embedding, hidden) < 1 or hidden % 2:
            raise ValueError(
                f"sizes are from 1, and hidden {hidden} has to be even: each direction has a half"
            )
        table = nn.Embedding(vocabulary_size, embedding)
        nn.init.normal_(table.weight, std=embedding**-0.5)
        self.encoder = Encoder(table, hidden, dropout)
        self.decoder = Decoder(table, hidden, dropout)
        state = ("batch", hidden)
        self.encoded = (
            TensorSpec(name="memory", shape=("batch", "source", hidden), content="of each source id"),
            TensorSpec(
                name="source_mask",
                dtype="bool",
                shape=("batch", "source"),
                content="true for an id, false for padding",
            ),
            TensorSpec(name="past.state", shape=state, content="before the ids"),
        )
        self.present = (
            TensorSpec(name="present.state", shape=state, content="after the ids: past.state of the next"),
        )
