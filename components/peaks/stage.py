"""Measure what the machine can do at most: bandwidth of each level of its memory, rate of matrix products."""

from __future__ import annotations

from hpml.artifacts.peaks import PeaksSpec
from hpml.components.peaks.config import PeaksConfig
from hpml.core.contract import Output, Result


def run(config: PeaksConfig, *, out: Output) -> Result[PeaksSpec]:
    """Measure the peaks of this machine; `samples.json` has the rate of every point in every round.

    Where a peak is not stable on a busy machine the result is incomplete: it is used, and measured again
    the next time.
    """
    from hpml.components.peaks.measure import measure

    return measure(config, out)
