"""A small, fair sample of the training images."""

from __future__ import annotations

import numpy as np

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact


def stratified_rows(data: Artifact[DatasetSpec], count: int, seed: int) -> tuple[int, ...]:
    """At most `count` rows of the train split, as many of each class as its share of the split, sorted.

    Every class gives at least one row, as long as `count` allows it.
    """
    labels = np.load(data.file("train_labels.npy"), allow_pickle=False)
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(labels))
    rank = np.empty(len(labels))  # of each row within its class, from 0 to almost 1
    for label in range(len(data.spec.class_names)):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members)) / max(len(members), 1)
    chosen = shuffled[np.argsort(rank[shuffled], kind="stable")[:count]]
    return tuple(sorted(int(row) for row in chosen))
