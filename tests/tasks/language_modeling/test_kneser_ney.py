"""The n-gram model against its definition, written down as it is in the paper."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from hpml.tasks.language_modeling.kneser_ney import KneserNey

VOCABULARY = 7


def text(seed: int, count: int) -> np.ndarray:
    """A stream in which each token makes some of the next likely."""
    random = np.random.default_rng(seed)
    likely = np.random.default_rng(0).dirichlet(np.full(VOCABULARY - 1, 0.4), size=VOCABULARY)
    tokens = [0]
    while len(tokens) < count:
        tokens.append(int(random.choice(VOCABULARY - 1, p=likely[tokens[-1]])))  # the last is never seen
    return np.array(tokens, np.int16)


class Plain:
    """Equations 12 to 17 of Chen and Goodman, an n-gram at a time."""

    def __init__(self, tokens: list[int], order: int) -> None:
        self.counts = {order: Counter(zip(*(tokens[at:] for at in range(order)), strict=False))}
        for length in range(order, 1, -1):
            self.counts[length - 1] = Counter(gram[1:] for gram in self.counts[length])

    def discount(self, length: int, count: int) -> float:
        of = Counter(self.counts[length].values())
        estimates = [0.5, 1.0, 1.5]
        if all(of[times] for times in (1, 2, 3, 4)):
            share = of[1] / (of[1] + 2 * of[2])
            found = [times - (times + 1) * share * of[times + 1] / of[times] for times in (1, 2, 3)]
            estimates = found if min(found) > 0 else estimates
        return [0, *estimates][min(count, 3)]

    def probability(self, context: tuple[int, ...], token: int) -> float:
        length = len(context) + 1
        lower = self.probability(context[1:], token) if context else 1 / VOCABULARY
        after = {gram[-1]: n for gram, n in self.counts[length].items() if gram[:-1] == context}
        if not after:
            return lower
        total = sum(after.values())
        held_back = sum(self.discount(length, n) for n in after.values())
        count = after.get(token, 0)
        return (count - self.discount(length, count) + held_back * lower) / total


@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_probabilities_are_those_of_the_paper(order: int) -> None:
    train, held_out = text(1, 400), text(2, 60)
    plain = Plain(train.tolist(), order)
    expected = [
        plain.probability(tuple(held_out[max(0, at + 1 - order) : at].tolist()), int(held_out[at]))
        for at in range(len(held_out))
    ]
    model = KneserNey(train, VOCABULARY, order)
    assert model.probabilities(held_out) == pytest.approx(expected, rel=1e-9)
    assert model.perplexity(held_out) == pytest.approx(math.exp(-np.log(expected[1:]).mean()))


def test_after_any_context_the_probabilities_sum_to_one() -> None:
    model = KneserNey(text(1, 2000), VOCABULARY)
    seen_and_not = [*np.lib.stride_tricks.sliding_window_view(text(3, 40), 4), np.full(4, VOCABULARY - 1)]
    for context in seen_and_not:
        after = [model.probabilities(np.append(context, token))[-1] for token in range(VOCABULARY)]
        assert min(after) > 0 and sum(after) == pytest.approx(1)


def test_what_was_seen_more_often_is_likelier_and_what_was_not_seen_is_possible() -> None:
    train = text(1, 5000)
    model, after = KneserNey(train, VOCABULARY, 2), defaultdict(Counter)
    for one, other in zip(train.tolist(), train[1:].tolist(), strict=False):
        after[one][other] += 1
    (often, _), *_, (rarely, _) = after[0].most_common()
    p_often, p_rarely, p_never = (
        model.probabilities(np.array([0, token]))[1] for token in (often, rarely, VOCABULARY - 1)
    )
    assert p_often > p_rarely > p_never > 0
