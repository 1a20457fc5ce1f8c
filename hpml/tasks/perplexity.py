"""Perplexity: what tasks are judged by whose networks tell how likely each next token is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpml.tasks.metric import Metric

_LARGEST_NLL = 700.0  # exp of more is no float64


def _perplexity(sums: Sequence[float]) -> float:
    nll, tokens = sums
    return math.exp(min(nll / tokens, _LARGEST_NLL))


# Of the sum of the negative log likelihoods, in nats, and the number of tokens.
PERPLEXITY = Metric("perplexity", "perplexity", better="lower", value=_perplexity, least=1.0)
