"""Conversations of two people: what one says, and what the other answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import ClassVar, Literal

from pydantic import Field

from hpml.core.contract import Output
from hpml.data_files import chitchat
from hpml.tasks.sequence_to_sequence.sources.base import PairsSource


class Conversations(PairsSource):
    """The Chit-Chat Challenge of BYU (2018), from the package `chitchat-dataset`: 7168 real conversations.

    Each turn is the target of the one before it.
    """

    GROUPS: ClassVar[str] = "conversations"

    source: Literal["conversations"] = "conversations"
    max_conversations: int | None = Field(default=None, ge=3)  # the first so many; None: all

    def unsupported_reason(self) -> str:
        """What is missing if the package is not installed."""
        return chitchat.FILE.unsupported_reason()

    def fingerprint(self) -> str:
        """The version of the package."""
        return chitchat.FILE.version()

    def groups(self, out: Output) -> tuple[Iterable[Sequence[tuple[str, str]]], str]:
        """The pairs of each conversation; of one without an answer there are none."""
        conversations = islice(chitchat.conversations(), self.max_conversations)
        return (tuple(pairwise(turns)) for turns in conversations), chitchat.LICENCE
