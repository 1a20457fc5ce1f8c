"""Which rows of a source are for training, for validation and for testing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpml.tasks.image_classification.data.loaded import Images
from hpml.tasks.prepared_splits import rows_drawn


@dataclass(frozen=True)
class Split:
    """Some rows of `images`, in an order: the images themselves stay where they are."""

    images: Images
    rows: NDArray[np.int64]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of the rows, int64 (rows,)."""
        return self.images.labels[self.rows]

    def label(self, position: int) -> int:
        """The class of the row at `position`."""
        return int(self.images.labels[self.rows[position]])

    def name(self, position: int | np.integer) -> str:
        """What its owner calls the row at `position`."""
        return self.images.names[int(self.rows[position])]

    def without(self, positions: list[int]) -> Split:
        """This split without the rows at `positions`."""
        return Split(self.images, np.delete(self.rows, np.array(positions, dtype=np.int64)))


def whole(images: Images) -> Split:
    """All rows of `images` in their own order."""
    return Split(images, np.arange(len(images.labels)))


def divided(split: Split, *, fraction: float, seed: int) -> tuple[Split, Split]:
    """`split` without a share of it, and that share: every class divided alike (see `rows_drawn`), each in a
    random order.
    """
    generator = np.random.default_rng(seed)
    labels = split.labels
    kept, taken = [], []
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        count = rows_drawn(len(rows), fraction)
        taken.append(rows[:count])
        kept.append(rows[count:])
    parts = (split.rows[generator.permutation(np.concatenate(rows))] for rows in (kept, taken))
    return Split(split.images, next(parts)), Split(split.images, next(parts))


def stratified_sample(labels: NDArray[np.int64], classes: int, count: int, seed: int) -> NDArray[np.int64]:
    """At most `count` rows, as many of each class as its share of all, sorted.

    Every class gives at least one row, as long as `count` allows it.
    """
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(labels))
    rank = np.empty(len(labels))  # of each row within its class, from 0 to almost 1
    for label in range(classes):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members)) / max(len(members), 1)
    return np.sort(shuffled[np.argsort(rank[shuffled], kind="stable")[:count]])
