"""Which rows of a source are for training and which for testing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpml.components.prepare.sources.base import Images


@dataclass(frozen=True)
class Split:
    """Some rows of `images`, in an order: the images themselves stay where they are."""

    images: Images
    rows: NDArray[np.int64]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of the rows, int64 (rows,)."""
        return self.images.labels[self.rows]

    def name(self, position: int | np.integer) -> str:
        """What its owner calls the row at `position`."""
        return self.images.names[int(self.rows[position])]

    def without(self, positions: list[int]) -> Split:
        """This split without the rows at `positions`."""
        return Split(self.images, np.delete(self.rows, np.array(positions, dtype=np.int64)))


def whole(images: Images) -> Split:
    """All rows of `images` in their own order."""
    return Split(images, np.arange(len(images.labels)))


def stratified(
    labels: NDArray[np.int64], *, test_fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows for training and rows for testing: every class divided alike, each split in a random order.

    Of a class with n rows, the nearest whole number to n * test_fraction is for testing, but at least one
    row is on either side where there are two.
    """
    generator = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        test_rows = min(max(round(len(rows) * test_fraction), 1), len(rows) - 1)
        test.append(rows[:test_rows])
        train.append(rows[test_rows:])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))
