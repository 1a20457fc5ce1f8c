"""An n-gram model with interpolated modified Kneser-Ney smoothing: what a network has to beat.

Chen and Goodman 1999, An empirical study of smoothing techniques for language modeling (the variant that
they found best), after Kneser and Ney 1995. The n-grams of an order are numbered, so that one of order n is a
pair of integers, the n-gram without its first token and that token: counting is sorting, for streams of some
million tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

ABSENT = -1  # the number of an n-gram that training did not see
_AT_ONCE = 2**18  # tokens whose probabilities are looked up together
_FALLBACK = (0.5, 1.0, 1.5)  # discounts where the counts of counts give no estimate: KenLM's


@dataclass(frozen=True)
class _Order:
    """The n-grams of one length n > 1 that training saw, by number.

    keys: sorted; suffix * vocabulary + first token, where suffix is the number of the n-gram without its
    first token. probability: of the last token after the others. weight: by the number of a context (an
    n-gram of length n - 1), the share that the shorter context gets; 1 where nothing was seen after it.
    """

    keys: Ids
    probability: Floats
    weight: Floats


class KneserNey:
    """Probabilities of tokens after the `order - 1` tokens before them.

    Lower orders count in how many different contexts an n-gram was seen instead of how often, and the lowest
    one is interpolated with the uniform distribution, so every token of the vocabulary has a probability.
    """

    def __init__(self, tokens: NDArray[np.integer], vocabulary_size: int, order: int = 5) -> None:
        """Count and smooth. tokens: a stream (count,) of integers from 0 to below `vocabulary_size`."""
        if order < 2 or len(tokens) < order:
            raise ValueError(f"order {order} with {len(tokens)} tokens: at least 2, and as many tokens")
        self.order, self._vocabulary_size = order, vocabulary_size
        stream = tokens.astype(np.int64)
        # By length: the number of the n-gram that ends at each place. That of its context, which is shorter
        # by one and ends a place before, has the same index.
        ending = {1: stream}
        keys: dict[int, Ids] = {1: np.arange(vocabulary_size)}
        seen_at: dict[int, Ids] = {}  # the index in `ending` where each n-gram was seen first
        for length in range(2, order + 1):
            key = self._key(ending[length - 1][1:], stream[: 1 - length])
            keys[length], seen_at[length], ending[length] = np.unique(
                key, return_index=True, return_inverse=True
            )
        counts = {order: np.bincount(ending[order])}
        for length in range(order, 1, -1):
            suffix = keys[length] // vocabulary_size
            counts[length - 1] = np.bincount(suffix, minlength=len(keys[length - 1]))

        context = np.zeros(vocabulary_size, np.int64)  # the empty one
        uniform = np.full(vocabulary_size, 1 / vocabulary_size)
        self._of_token, _ = _interpolated(counts[1], context, uniform, contexts=1)
        self._orders: list[_Order] = []
        lower = self._of_token
        for length in range(2, order + 1):
            context = ending[length - 1][seen_at[length]]
            of_suffix = lower[keys[length] // vocabulary_size]
            contexts = len(keys[length - 1])
            lower, weight = _interpolated(counts[length], context, of_suffix, contexts)
            self._orders.append(_Order(keys[length], lower, weight))

    def probabilities(self, tokens: NDArray[np.integer]) -> Floats:
        """Of each token of a stream (count,) after those before it: the first have shorter contexts."""
        stream = tokens.astype(np.int64)
        found = self._of_token[stream]
        before = stream[:-1]  # by place from the second on: the number of the context that ends before it
        number = stream
        for length, of_order in enumerate(self._orders, start=2):
            number = self._look_up(of_order.keys, number[1:], stream[: 1 - length])
            here = found[length - 1 :]
            weight = np.where(before == ABSENT, 1.0, of_order.weight[before])
            here[:] = np.where(number == ABSENT, weight * here, of_order.probability[number])
            before = number[:-1]
        return found

    def perplexity(self, tokens: NDArray[np.integer]) -> float:
        """exp of the mean negative log probability of all tokens of a stream but the first."""
        log_probability = 0.0
        for begin in range(1, len(tokens), _AT_ONCE):
            before = min(begin, self.order - 1)
            part = self.probabilities(tokens[begin - before : begin + _AT_ONCE])
            log_probability += float(np.log(part[before:]).sum())
        return math.exp(-log_probability / (len(tokens) - 1))

    def _key(self, suffix: Ids, first_token: Ids) -> Ids:
        return suffix * self._vocabulary_size + first_token

    def _look_up(self, keys: Ids, suffix: Ids, first_token: Ids) -> Ids:
        wanted = self._key(suffix, first_token)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[place] == wanted) & (suffix != ABSENT), place, ABSENT)


def _interpolated(count: Ids, context: Ids, lower: Floats, contexts: int) -> tuple[Floats, Floats]:
    """The probability of each n-gram, and for each of so many contexts the weight of the lower order."""
    discount = np.array([0.0, *_discounts(count)])[np.minimum(count, 3)]
    total = np.bincount(context, weights=count, minlength=contexts)
    held_back = np.bincount(context, weights=discount, minlength=contexts)
    weight = np.divide(held_back, total, out=np.ones(contexts), where=total > 0)
    # An n-gram that was seen at the very start only has no left neighbour: in a lower order it counts 0.
    return (count - discount) / np.maximum(total, 1)[context] + weight[context] * lower, weight


def _discounts(count: Ids) -> tuple[float, ...]:
    """What is taken from counts of 1, 2, and 3 and more (Chen and Goodman 1999, equation 17)."""
    once, twice, thrice, four_times = (int((count == times).sum()) for times in (1, 2, 3, 4))
    if not (once and twice and thrice and four_times):
        return _FALLBACK
    share = once / (once + 2 * twice)
    estimates = (
        1 - 2 * share * twice / once,
        2 - 3 * share * thrice / twice,
        3 - 4 * share * four_times / thrice,
    )
    usable = all(0 < estimate <= times for times, estimate in enumerate(estimates, start=1))
    return estimates if usable else _FALLBACK
