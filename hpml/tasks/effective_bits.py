"""How much of 8 bits is left of a layer's inputs where one scale has to do for all of them."""

from __future__ import annotations

import math

# Half of the 8. A normal distribution keeps about 6 bits, one with the tails of Laplace's 5. Where fewer are
# kept, the range is that of a few large numbers, as the products in a gated MLP have (activation spikes; Yang
# et al. 2024, arXiv:2405.14428).
LEAST_BITS = 4.0


def effective_bits(noise: float) -> float:
    """The effective number of bits (IEEE Std 1241) of numbers whose errors have the share `noise` of power.

    An ideal converter of B bits has a ratio of signal to noise of 6.02 B + 1.76 dB. Powers are those of a row
    that a layer multiplies, and `noise` is the mean over rows: a spike in one row leaves nothing of others.
    """
    return (-10 * math.log10(noise) - 1.76) / 6.02 if noise else math.inf
