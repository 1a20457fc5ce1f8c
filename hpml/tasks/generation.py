"""Texts that come piece by piece: how tokens are chosen, and what a task gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Choose = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.int64]]


_INCOMPLETE = "\ufffd"  # what a letter decodes to of which bytes are missing


class Piece(NamedTuple):
    """Some letters more. tokens: how many they took; finish: why it is the last, "" while there are more."""

    text: str
    tokens: int
    finish: Literal["", "stop", "length"] = ""


@dataclass(frozen=True)
class Generation:
    """A text that is generated as its pieces are asked for. prompt_tokens: what the network was given."""

    prompt_tokens: int
    pieces: Iterator[Piece]


def as_pieces(
    tokens: Iterable[int], decode: Callable[[list[int]], str], *, end_id: int, room: int
) -> Iterator[Piece]:
    """What `tokens` say, up to `end_id` or as many as there is room for; letters are told whole."""
    known: list[int] = []
    told, counted = "", 0
    for token in tokens:
        is_end = token == end_id
        if not is_end:
            known.append(token)
        text = decode(known)
        is_over = is_end or len(known) == room
        if is_over or not text.endswith(_INCOMPLETE):
            finish: Literal["", "stop", "length"] = "stop" if is_end else "length" if is_over else ""
            yield Piece(text[len(told) :], len(known) - counted, finish)
            told, counted = text, len(known)
        if is_over:
            return


def sampler(temperature: float, top_p: float, seed: int | None) -> Choose:
    """What draws the next token (rows, 1) of `logits` (rows, places, vocabulary), by the last place.

    temperature: 0 is the likeliest. top_p: of the likeliest tokens whose probabilities reach it together
    (Holtzman et al. 2020, arXiv:1904.09751).
    """
    chance = np.random.default_rng(seed)

    def choose(answer: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        logits = answer["logits"][:, -1].astype(np.float64)
        if temperature == 0:
            return np.asarray(logits.argmax(axis=-1, keepdims=True), np.int64)
        return np.array([[_drawn(row / temperature, top_p, chance)] for row in logits], np.int64)

    return choose


def _drawn(logits: NDArray[np.float64], top_p: float, chance: np.random.Generator) -> int:
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(shares[order]), top_p)) + 1]
    return int(chance.choice(kept, p=shares[kept] / shares[kept].sum()))
