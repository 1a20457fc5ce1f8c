"""The contract of a dataset. A set that breaks it is refused, and the offending rows are listed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hpml.components.prepare.splits import Split
from hpml.core.errors import StageFailed

SHOWN = 10
_DUPLICATES_SHOWN = 3  # groups, and places in each: a group has several names


def refuse(
    problem: str, offenders: Sequence[str], *, fix: str, unit: str = "row", shown: int = SHOWN
) -> NoReturn:
    """Raise StageFailed that names the first offending rows (or files, ...) and how many there are."""
    raise StageFailed(f"the data is refused, {problem}", why=counted(offenders, unit, shown), fix=fix)


def counted(names: Sequence[str], unit: str, shown: int = SHOWN) -> str:
    """How many there are, and the first of them: "2 files: a.txt, b.txt"."""
    first = _first([_printable(name) for name in names], shown, ", ")
    return f"{len(names)} {unit}{'s' if len(names) > 1 else ''}: {first}"


def _first(names: Sequence[str], shown: int, between: str) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def check_class_names(class_names: Sequence[str]) -> None:
    """Refuse names that are empty, repeated or unfit for a terminal, and fewer than two classes."""
    if len(class_names) < 2:
        found = ", ".join(map(_printable, class_names)) or "none"
        raise StageFailed("the data is refused, it has fewer than two classes", why=f"found {found}")
    unfit = [name for name in class_names if not name.strip() or not name.isprintable()]
    repeated = [name for name in set(class_names) if class_names.count(name) > 1]
    if unfit or repeated:
        refuse(
            "class names are empty, repeated or unprintable",
            [ascii(name) for name in [*unfit, *sorted(repeated)]],
            fix="rename these classes",
            unit="name",
        )


def check_shapes(splits: Mapping[str, Split]) -> None:
    """Refuse images that differ in shape between the splits, or have neither one nor three channels."""
    shapes = {name: split.images.images_nhwc.shape[1:] for name, split in splits.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {_size(shape)}" for name, shape in shapes.items())
        raise StageFailed("the data is refused, its splits have images of different shapes", why=listed)
    shape = next(iter(shapes.values()))
    if len(shape) != 3 or shape[-1] not in (1, 3) or min(shape) < 1:
        raise StageFailed(
            "the data is refused, its images have no usable shape",
            why=f"{_size(shape)}; height x width x channels with 1 or 3 channels is allowed",
        )


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def check_labels(splits: Mapping[str, Split], classes: int) -> None:
    """Refuse labels outside 0 to classes - 1."""
    rows = [
        f"{split.name(position)} (label {labels[position]})"
        for split, labels in ((split, split.labels) for split in splits.values())
        for position in np.flatnonzero((labels < 0) | (labels >= classes))
    ]
    if rows:
        refuse(f"labels are not in 0 to {classes - 1}", rows, fix="correct or remove these rows")


def check_class_counts(splits: Mapping[str, Split], class_names: Sequence[str]) -> None:
    """Refuse a class without rows in one of the splits."""
    empty = [
        f"{class_names[label]!r} in {name}"
        for name, split in splits.items()
        for label, count in enumerate(class_counts(split, len(class_names)))
        if count == 0
    ]
    if empty:
        refuse(
            "not every class is in every split",
            empty,
            fix="add images, at least one of a class for each split, or remove the class",
            unit="gap",
        )


def class_counts(split: Split, classes: int) -> NDArray[np.int64]:
    """How many rows of `split` each class has, int64 (classes,)."""
    return np.bincount(split.labels, minlength=classes)


# ------------------------------------------------------------------------------------------------ duplicates


@dataclass(frozen=True)
class RowPosition:
    """Where an image is: the position in a split."""

    split: str
    position: int


@dataclass
class Duplicates:
    """Images, equal in every pixel, that are in several places.

    conflicting: under several labels. leaked: in both splits, under one label. repeats_in_train: how many
    train rows repeat an earlier one under the same label, which harms nothing.
    """

    conflicting: list[list[RowPosition]]
    leaked: list[list[RowPosition]]
    repeats_in_train: int


def find_duplicates(splits: Mapping[str, Split]) -> Duplicates:
    """Every group of equal images, by the SHA-256 of their pixels."""
    groups: dict[bytes, list[RowPosition]] = defaultdict(list)
    for name, split in splits.items():
        for position, row in enumerate(split.rows):
            digest = hashlib.sha256(split.images.images_nhwc[row].tobytes()).digest()
            groups[digest].append(RowPosition(name, position))
    labels = {name: split.labels for name, split in splits.items()}
    found = Duplicates([], [], 0)
    for places in groups.values():
        if len({labels[place.split][place.position] for place in places}) > 1:
            found.conflicting.append(places)
        elif len({place.split for place in places}) > 1:
            found.leaked.append(places)
        elif places[0].split == "train":
            found.repeats_in_train += len(places) - 1
    return found


def refuse_duplicates(splits: Mapping[str, Split], found: Duplicates) -> None:
    """Refuse an image that is under several labels, or in both splits."""
    fix = "remove them, or set `duplicates: drop` under `data`"
    problems = {
        "images are in it under several labels": found.conflicting,
        "images for testing are also for training": found.leaked,
    }
    for problem, groups in problems.items():
        named = [[splits[place.split].name(place.position) for place in group] for group in groups]
        if named:
            listed = [_first(names, _DUPLICATES_SHOWN, " = ") for names in named]
            refuse(problem, listed, fix=fix, shown=_DUPLICATES_SHOWN)


def drop_duplicates(
    splits: Mapping[str, Split], found: Duplicates
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """The splits without the offending rows, and what was dropped in words.

    An image under several labels goes altogether, for nobody can say which is right; one that is in both
    splits stays in test, so that figures stay comparable.
    """
    conflicting = [place for group in found.conflicting for place in group]
    leaked = [place for group in found.leaked for place in group if place.split == "train"]
    kept = {
        name: split.without([place.position for place in (*conflicting, *leaked) if place.split == name])
        for name, split in splits.items()
    }
    notes = {
        f"dropped {len(conflicting)} rows whose image is also under another label": conflicting,
        f"dropped {len(leaked)} train rows whose image is also in the test split": leaked,
    }
    return kept, tuple(note for note, dropped in notes.items() if dropped)
