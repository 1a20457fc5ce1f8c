"""Greedy and beam search on a network whose probabilities are known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpml.artifacts.operation import Operation
from hpml.tasks.sequence_to_sequence.decoding import beam_search, greedy
from hpml.tasks.sequence_to_sequence.tokenizer import BEGIN, END, PADDING

A, B = 3, 4
IMPOSSIBLE = 1e-9
# What comes after each id: the likeliest first step leads to answers that are none of them likely.
AFTER = {
    BEGIN: {A: 0.55, B: 0.45},
    A: {A: 0.4, B: 0.3, END: 0.3},
    B: {B: 0.05, END: 0.95},
}


class Chain:
    """A network that looks back by one id: a state counts its steps, to show that it is handed on."""

    operations: Mapping[str, Operation] = {}

    def run(self, feeds: Mapping[str, NDArray[Any]], operation: str = "predict") -> dict[str, NDArray[Any]]:
        if operation == "encode":
            return {"past.steps": np.zeros((len(feeds["source_ids"]), 1), np.float32)}
        input_ids = feeds["input_ids"]
        probabilities = np.full((*input_ids.shape, 5), IMPOSSIBLE, np.float32)
        for place in np.ndindex(*input_ids.shape):
            for number, probability in AFTER.get(int(input_ids[place]), {END: 1.0}).items():
                probabilities[(*place, number)] = probability
        steps = feeds["past.steps"] + input_ids.shape[1]
        return {"logits": np.log(probabilities), "present.steps": steps}


def likelihood(answer: tuple[int, ...]) -> float:
    steps = itertools.pairwise((BEGIN, *answer))
    return float(np.prod([AFTER[one].get(other, IMPOSSIBLE) for one, other in steps]))


def test_greedy_takes_the_likeliest_step() -> None:
    answers = greedy(Chain(), np.array([[1, END], [1, END]]), steps=4)
    assert answers.tolist() == [[A, A, A, A]] * 2


def test_a_row_that_has_ended_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AFTER, A, {END: 1.0})
    assert greedy(Chain(), np.array([[END]]), steps=4).tolist() == [[A, END, PADDING, PADDING]]


def test_beams_find_the_likeliest_answer() -> None:
    [found] = beam_search(Chain(), np.array([[1, END]]), steps=4, beams=3).tolist()
    ended = [
        (*words, END) for length in range(4) for words in itertools.product((A, B), repeat=length) if words
    ]
    best = max(ended, key=lambda one: np.log(likelihood(one)) / ((5 + len(one)) / 6) ** 0.6)
    assert tuple(found[: len(best)]) == best == (B, END)
    assert set(found[len(best) :]) == {PADDING}


def test_beams_without_an_end_give_the_likeliest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AFTER, A, {A: 1.0})
    monkeypatch.setitem(AFTER, B, {B: 1.0})
    assert beam_search(Chain(), np.array([[END]]), steps=3, beams=2).tolist() == [[A, A, A]]
