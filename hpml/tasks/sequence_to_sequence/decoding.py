"""Answers, step by step, by any runtime: greedy, and by beam search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpml.tasks.base import Runs
from hpml.tasks.generation import Piece, as_pieces
from hpml.tasks.sequence_to_sequence.tokenizer import BEGIN, END, PADDING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hpml.tasks.generation import Choose

Ids = NDArray[np.int64]
State = Mapping[str, NDArray[Any]]

_LENGTH_PENALTY = 0.6  # alpha of Wu et al.


def encoded(runs: Runs, source_ids: NDArray[np.integer]) -> State:
    """What the decoder begins with: of source ids (rows, source)."""
    return runs.run({"source_ids": source_ids.astype(np.int64)}, "encode")


def decoded(runs: Runs, input_ids: NDArray[np.integer], state: State) -> tuple[NDArray[np.float32], State]:
    """Logits (rows, steps, vocabulary) of what comes after `input_ids` (rows, steps), and the state then."""
    outputs = runs.run({"input_ids": input_ids.astype(np.int64), **state}, "decode")
    logits = outputs.pop("logits")
    present = {name.replace("present.", "past.", 1): array for name, array in outputs.items()}
    return logits, {**state, **present}


def greedy(runs: Runs, source_ids: NDArray[np.integer], steps: int) -> Ids:
    """The likeliest id after each, (rows, steps), with PADDING behind the END."""
    rows = len(source_ids)
    answers = np.full((rows, steps), PADDING, np.int64)
    ends = np.zeros(rows, bool)
    state, last = encoded(runs, source_ids), np.full((rows, 1), BEGIN)
    for step in range(steps):
        logits, state = decoded(runs, last, state)
        likeliest = logits[:, -1].argmax(axis=-1)
        answers[:, step] = np.where(ends, PADDING, likeliest)
        ends |= likeliest == END
        if ends.all():
            break
        last = likeliest[:, None]
    return answers


def pieces(
    runs: Runs, source_ids: NDArray[np.integer], room: int, choose: Choose, tokenizer: Tokenizer
) -> Iterator[Piece]:
    """The answer to one source (1, source), a chosen id after the other."""

    def ids() -> Iterator[int]:
        state, last = encoded(runs, source_ids), np.full((1, 1), BEGIN)
        while True:
            logits, state = decoded(runs, last, state)
            last = choose({"logits": logits})
            yield int(last[0, 0])

    told = as_pieces(ids(), tokenizer.decode, end_id=END, room=room)
    for place, piece in enumerate(told):
        yield piece._replace(text=piece.text.lstrip()) if place == 0 else piece  # words begin with a blank


def beam_search(runs: Runs, source_ids: NDArray[np.integer], steps: int, beams: int) -> Ids:
    """The best answer to one source (1, source) among `beams` at a time: (1, steps), PADDING behind the END.

    Answers are compared by log likelihood over ((5 + length) / 6) ** 0.6 (Wu et al. 2016, arXiv:1609.08144);
    without that the shortest would win.
    """
    state: State = {
        name: np.repeat(array, beams, axis=0) for name, array in encoded(runs, source_ids).items()
    }
    ids = np.full((beams, 1), BEGIN)
    scores = np.where(np.arange(beams) == 0, 0.0, -np.inf)  # all begin alike: only one may go on
    best, best_score = ids[0, 1:], -np.inf
    for step in range(steps):
        logits, state = decoded(runs, ids[:, -1:], state)
        totals = scores[:, None] + _log_softmax(logits[:, -1])
        order = np.argsort(-totals, axis=None, kind="stable")[: 2 * beams]
        parents, chosen = np.unravel_index(order, totals.shape)
        ended = chosen == END
        for parent, score in zip(parents[ended], totals[parents[ended], END], strict=True):
            if _worth(score, step + 1) > best_score:
                best, best_score = np.append(ids[parent, 1:], END), _worth(score, step + 1)
        parents, chosen = parents[~ended][:beams], chosen[~ended][:beams]
        ids = np.concatenate([ids[parents], chosen[:, None]], axis=1)
        scores = totals[parents, chosen]
        state = {name: array[parents] for name, array in state.items()}
        if _worth(scores[0], steps) <= best_score:  # the likeliest could not become better any more
            break
    if _worth(scores[0], steps) > best_score:
        best = ids[0, 1:]
    return np.pad(best, (0, steps - len(best)), constant_values=PADDING)[None]


def _worth(score: float, length: int) -> float:
    worth: float = score / ((5 + length) / 6) ** _LENGTH_PENALTY
    return worth


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_softmax: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_softmax
