"""A language model that talks: it goes on with a text, or with a conversation whose turns are lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpml.core.errors import ConfigInvalid
from hpml.tasks.base import Runs
from hpml.tasks.generation import Generation, Piece, as_pieces
from hpml.tasks.language_modeling.cache import steps
from hpml.tasks.language_modeling.tokenizer import FILE, encoded, load_tokenizer

if TYPE_CHECKING:
    from hpml.tasks.generation import Choose


@dataclass(frozen=True)
class Speaker:
    """What a network has to know to go on with a text.

    context: tokens that it can look back. begin_ids: of the tokens that stand before a text; end_id: of the
    one that stands after it.
    """

    runs: Runs
    files: Path
    context: int
    begin_ids: Sequence[int]
    end_id: int

    def continuation(
        self, text: str, choose: Choose, *, max_tokens: int, until_line_ends: bool = False
    ) -> Generation:
        """What follows `text`, until the network ends it, or after a line if only that is wanted.

        At most half of the context is generated. Where a line is wanted, the last tokens count, as many as
        fit; else raises ConfigInvalid for a text that does not fit.
        """
        tokenizer = load_tokenizer(self.files / FILE)
        [known] = encoded(tokenizer, [text])
        room = min(max_tokens, self.context // 2)
        prompt = [*self.begin_ids, *known]
        if len(prompt) > self.context - room and not until_line_ends:
            raise ConfigInvalid(
                f"the text has {len(prompt)} tokens",
                why=f"with {room} to come, {self.context - room} fit into the context of {self.context}",
            )
        prompt = prompt[room - self.context :]
        tokens = (int(step[0, 0]) for step in steps(self.runs, np.array([prompt], np.int64), choose))
        pieces = as_pieces(tokens, tokenizer.decode, end_id=self.end_id, room=room)
        return Generation(len(prompt), _first_line(pieces) if until_line_ends else pieces)

    def next_line(self, said: Sequence[str], choose: Choose, *, max_tokens: int) -> Generation:
        """The line after those that were said."""
        lines = [" ".join(line.split()) for line in said]
        return self.continuation("\n".join([*lines, ""]), choose, max_tokens=max_tokens, until_line_ends=True)


def _first_line(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Up to the end of the line, without blanks before it."""
    is_begun = False
    for piece in pieces:
        text = piece.text if is_begun else piece.text.lstrip(" ")
        line, ended, _ = text.partition("\n")
        is_begun = is_begun or bool(text)
        yield Piece(line, piece.tokens, "stop" if ended else piece.finish)
        if ended:
            return
