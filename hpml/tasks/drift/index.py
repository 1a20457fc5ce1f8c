"""The population stability index (PSI): how far a quantity is from what it was in a reference.

Of a quantity that falls into bins, with the share p of each bin now and q in the reference,

    PSI = sum of (p - q) * ln(p / q) over the bins

which is the divergence of Kullback and Leibler there and back. Below 0.1 counts as no change, above 0.25 as
one that needs a look: N. Siddiqi, "Credit Risk Scorecards" (2006). Without any change it is about (bins - 1)
* (1 / n + 1 / m) for n values now and m in the reference: B. Yurdakul, "Statistical Properties of Population
Stability Index" (Western Michigan University, 2018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, FiniteFloat, model_validator

from hpml.core.contract import Config

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BINS, MOST_CATEGORIES = 10, 1 << 20
_SMOOTHING = 0.5  # added to each count: a bin without any has no logarithm
_Bin = Annotated[int, Field(ge=0, le=MOST_BINS)]


class Bins(Config):
    """The bins of a quantity, and how many values of the reference are in each.

    edges: of numbers, ascending: a bin ends with its edge, the first one has no beginning, the last no end.
    bin_of: of categories, the bin of each from 0; the last bin is that of all others.
    """

    edges: tuple[FiniteFloat, ...] = Field(default=(), max_length=MOST_BINS + 1)
    bin_of: tuple[_Bin, ...] = Field(default=(), max_length=MOST_CATEGORIES)
    counts: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2, max_length=MOST_BINS + 2)

    @model_validator(mode="after")
    def _agrees(self) -> Bins:
        is_right = (
            max(self.bin_of) < len(self.counts) if self.bin_of else len(self.edges) == len(self.counts) - 1
        )
        if not is_right or list(self.edges) != sorted(set(self.edges)):
            raise ValueError("its bins are not those of its counts")
        return self


class Counter:
    """Values in the bins of a reference; those of before count less and less."""

    def __init__(self, bins: Bins) -> None:
        self._edges, self._bin_of = np.array(bins.edges), np.array(bins.bin_of, np.int64)
        self._reference, self._counts = np.array(bins.counts, np.float64), np.zeros(len(bins.counts))

    def add(self, values: NDArray[Any], keep: float) -> None:
        """Count `values`; what was counted before weighs `keep` of what it did."""
        if len(self._bin_of):
            places = values.astype(np.int64).clip(-1, len(self._bin_of))
            is_known = (places >= 0) & (places < len(self._bin_of))
            bins = np.where(is_known, self._bin_of[np.where(is_known, places, 0)], len(self._counts) - 1)
        else:
            bins = np.searchsorted(self._edges, values)
        self._counts = self._counts * keep + np.bincount(bins, minlength=len(self._counts))

    @property
    def psi(self) -> float:
        """The index of what was counted against the reference."""
        now, then = (
            (counts + _SMOOTHING) / (counts + _SMOOTHING).sum() for counts in (self._counts, self._reference)
        )
        return float(((now - then) * np.log(now / then)).sum())
