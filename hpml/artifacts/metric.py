"""What a measure of quality is called, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricFacts:
    """A metric for readers.

    name: in artifacts and recipes. label: for readers. is_share: a share of 0 to 1, told in percent, lost in
    points (differences); what is not is lost in percent of the reference (ratios).
    """

    name: str
    label: str
    better: Literal["higher", "lower"]
    is_share: bool = False
    unit: str = ""

    def loss(self, value: float, reference: float) -> float:
        """How much worse `value` is than `reference`: of a share the difference, else relative to it.

        Negative where it is better.
        """
        worse = reference - value if self.better == "higher" else value - reference
        return worse if self.is_share or reference == 0 else worse / abs(reference)

    def in_words(self, value: float) -> str:
        """The figure for a reader: "97.20%", "12.3"."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}{f' {self.unit}' if self.unit else ''}"

    def loss_in_words(self, loss: float) -> str:
        """A loss for a reader: "1.20 points", "3.4 %"."""
        return f"{100 * loss:.2f} {self.loss_unit}"

    @property
    def heading(self) -> str:
        """Above a column of its figures: "top-1, %"."""
        unit = "%" if self.is_share else self.unit
        return f"{self.label}, {unit}" if unit else self.label

    @property
    def scale(self) -> float:
        """What its figures are multiplied by before they are shown under `heading`."""
        return 100.0 if self.is_share else 1.0

    @property
    def places(self) -> int | None:
        """Decimals under `heading`; None for three significant digits."""
        return 1 if self.is_share else None

    @property
    def loss_unit(self) -> str:
        """Of a hundred times a loss."""
        return "points" if self.is_share else "%"

    def worst_allowed(self, reference: float, loss: float) -> float:
        """The value that is worse than `reference` by `loss`."""
        worse = loss if self.is_share else loss * abs(reference)
        return reference - worse if self.better == "higher" else reference + worse

    def is_met(self, value: float, bound: float) -> bool:
        """Whether `value` is at least as good as `bound`."""
        return value >= bound if self.better == "higher" else value <= bound


ACCURACY_TOP1 = MetricFacts("accuracy_top1", "top-1", better="higher", is_share=True)
