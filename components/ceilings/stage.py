"""Measure what the machine can do at most: bandwidth of each level of its memory, rate of matrix products."""

from __future__ import annotations

from hpml.artifacts.ceilings import CeilingsSpec
from hpml.components.ceilings.config import CeilingsConfig
from hpml.core.contract import Output, Result


def run(config: CeilingsConfig, *, out: Output) -> Result[CeilingsSpec]:
    """Measure the ceilings of this machine; `samples.json` has the rate of every point in every round.

    Where a ceiling is not stable on a busy machine the result is incomplete: it is used, and measured again
    the next time.
    """
    from hpml.components.ceilings.measure import measure

    return measure(config, out)
