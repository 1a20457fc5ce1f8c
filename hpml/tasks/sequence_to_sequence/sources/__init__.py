"""The sources of pairs of texts. A source is one file here and one row of SOURCES."""

from __future__ import annotations

from hpml.tasks.sequence_to_sequence.sources.base import PairsSource
from hpml.tasks.sequence_to_sequence.sources.conversations import Conversations
from hpml.tasks.sequence_to_sequence.sources.pairs import Pairs

SOURCES: dict[str, type[PairsSource]] = {
    "conversations": Conversations,
    "pairs": Pairs,
}

__all__ = ["SOURCES", "PairsSource"]
