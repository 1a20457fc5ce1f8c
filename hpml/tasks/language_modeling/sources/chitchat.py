"""Chitchat: 7168 real conversations of two people, from inside the package `chitchat-dataset`."""

from __future__ import annotations

from itertools import islice
from typing import Literal

from pydantic import Field

from hpml.core.contract import Output
from hpml.data_files import chitchat
from hpml.tasks.language_modeling.sources.base import Texts, TextSource


class Chitchat(TextSource):
    """The conversations of the Chit-Chat Challenge (Brigham Young University, 2018), a line for each turn."""

    source: Literal["chitchat"] = "chitchat"
    conversations: int = Field(default=chitchat.CONVERSATIONS, ge=10, le=chitchat.CONVERSATIONS)  # the first

    def unsupported_reason(self) -> str:
        """What is missing if the package is not installed, or of a tokenizer that is given."""
        return chitchat.FILE.unsupported_reason() or super().unsupported_reason()

    def fingerprint(self) -> str:
        """The version of the package with the conversations, and a digest of a tokenizer that is given."""
        return chitchat.FILE.version() + super().fingerprint()

    def open_texts(self, out: Output) -> Texts:
        """A text for each conversation that has words. Raises StageFailed if the file is damaged."""
        some = islice(chitchat.conversations(), self.conversations)
        return Texts(["\n".join(turns) for turns in some if turns], chitchat.LICENCE)
