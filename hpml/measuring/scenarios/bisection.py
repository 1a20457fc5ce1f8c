"""The search for the largest rate that passes."""

from __future__ import annotations

import math

PRECISION = 1.1  # the smallest rate that failed is at most so many times the largest that passed
_FIRST_STEP = PRECISION**2  # one bisection leads from it to the precision
_LEAST_LOAD = 0.01  # of the ceiling; below it nothing is searched


class Bisection:
    """Upwards or downwards until one rate passed and one failed, then in between, on the logarithm.

    ceiling: the rate at which an engine has no pause; the search begins a step below it.
    """

    def __init__(self, ceiling: float) -> None:
        self.passed = 0.0
        self.failed = math.inf
        self._ceiling, self._step = ceiling, _FIRST_STEP

    @property
    def bracketed(self) -> bool:
        """Whether one rate passed and one failed."""
        return self.passed > 0 and math.isfinite(self.failed)

    def next_rate(self) -> float | None:
        """What to try next; None if the precision is reached, or nothing passes."""
        if self.bracketed:
            return None if self.failed / self.passed <= PRECISION else math.sqrt(self.passed * self.failed)
        if self.passed:
            return self.passed * self._step
        if math.isinf(self.failed):
            return self._ceiling / self._step
        least = _LEAST_LOAD * self._ceiling
        return max(self.failed / self._step, least) if self.failed > least else None

    def learn(self, rate: float, *, passes: bool) -> None:
        """Take note of a trial. A second step the same way goes twice as far: a far end is soon found."""
        begun = self.passed > 0 or math.isfinite(self.failed)
        if passes:
            self.passed = rate
        else:
            self.failed = rate
        if begun and not self.bracketed:
            self._step **= 2
