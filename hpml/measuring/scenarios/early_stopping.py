"""Early stopping as in MLPerf's loadgen: what n queries tell of a percentile with 99 % confidence.

Each query lies beyond the quantile `level` with probability 1 - `level`. Where at most t of n queries lie
beyond a latency, and so few would be seen in less than 1 case of 100 if the quantile were larger than it, the
quantile is not. See the MLPerf Inference Rules, appendix "Early Stopping Criterion".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.99


def allowed_overlatencies(queries: int, level: float, *, confidence: float = CONFIDENCE) -> int:
    """The largest t for which t overlatencies in `queries` show that the quantile `level` is met; -1 if none.

    P(X <= t) < 1 - `confidence` for X ~ Binomial(`queries`, 1 - `level`): 1 of 64 for p90; for p99, 0 of 459
    and 1 of 662.
    """
    from scipy import special  # what of scipy is quick to import

    so_few = special.bdtr(np.arange(queries + 1), queries, 1 - level)
    return int(np.searchsorted(so_few, 1 - confidence)) - 1


def bound(latencies: Sequence[float], level: float) -> float | None:
    """What the quantile `level` is below with 99 % confidence: the t-th largest latency, as loadgen has it.

    None if there are too few: not even one overlatency would be allowed.
    """
    allowed = allowed_overlatencies(len(latencies), level)
    return sorted(latencies)[-allowed] if allowed >= 1 else None
