"""The contract of a dataset. A set that breaks it is refused, and the offending rows are listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hpml.core.errors import StageFailed
from hpml.core.words import SHOWN, counted, first, printable
from hpml.tasks.image_classification.data.splits import Split

_KEPT_FIRST = ("test", "validation", "train")
_DUPLICATES_SHOWN = 3  # groups, and places in each: a group has several names


def refuse(
    problem: str, offenders: Sequence[str], *, fix: str, unit: str = "row", shown: int = SHOWN
) -> NoReturn:
    """Raise StageFailed that names the first offending rows (or files, ...) and how many there are."""
    raise StageFailed(f"the data is refused, {problem}", why=counted(offenders, unit, shown), fix=fix)


def check_class_names(class_names: Sequence[str]) -> None:
    """Refuse names that are empty, repeated or unfit for a terminal, and fewer than two classes."""
    if len(class_names) < 2:
        found = ", ".join(map(printable, class_names)) or "none"
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

    conflicting: under several labels. leaked: in several splits, under one label. repeats_in_train: how many
    train rows repeat an earlier one under the same label, which harms nothing.
    """

    conflicting: list[list[RowPosition]]
    leaked: list[list[RowPosition]]
    repeats_in_train: int


def find_duplicates(splits: Mapping[str, Split]) -> Duplicates:
    """Every group of equal images, by the digests of their pixels."""
    found = Duplicates([], [], 0)
    labels = {name: split.labels for name, split in splits.items()}
    for places in _groups({name: split.images.digests[split.rows] for name, split in splits.items()}):
        if len({labels[place.split][place.position] for place in places}) > 1:
            found.conflicting.append(places)
        elif len({place.split for place in places}) > 1:
            found.leaked.append(places)
        elif places[0].split == "train":
            found.repeats_in_train += len(places) - 1
    return found


def without_repeats_of(split: Split, other: Split) -> Split:
    """`split` without the images that `other` has under the same label, too.

    Both were made of one, whose repeats harm nothing.
    """
    splits = {"other": other, "split": split}
    repeats = []
    for places in _groups({name: one.images.digests[one.rows] for name, one in splits.items()}):
        known = {other.label(place.position) for place in places if place.split == "other"}
        repeats += [
            place.position
            for place in places
            if place.split == "split" and split.label(place.position) in known
        ]
    return split.without(repeats)


def _groups(digests: Mapping[str, NDArray[np.uint64]]) -> Iterator[list[RowPosition]]:
    """The places of each digest that is in several, in the order of the first."""
    whole = np.concatenate(list(digests.values()))
    order = np.lexsort(whole.T)
    is_first = np.ones(len(order), bool)
    is_first[1:] = (whole[order[1:]] != whole[order[:-1]]).any(axis=1)
    starts = np.append(np.flatnonzero(is_first), len(order))
    repeated = np.flatnonzero(np.diff(starts) > 1)
    ends = np.cumsum([len(of_split) for of_split in digests.values()])
    names = list(digests)
    for rows in sorted(np.sort(order[starts[group] : starts[group + 1]]).tolist() for group in repeated):
        of_split = np.searchsorted(ends, rows, side="right").tolist()
        yield [
            RowPosition(names[split], row - int(ends[split]) + len(digests[names[split]]))
            for row, split in zip(rows, of_split, strict=True)
        ]


def refuse_duplicates(splits: Mapping[str, Split], found: Duplicates) -> None:
    """Refuse an image that is under several labels, or in several splits."""
    fix = "remove them, or set `duplicates: drop` under `data`"
    problems = {
        "images are in it under several labels": found.conflicting,
        "images are in several splits": found.leaked,
    }
    for problem, groups in problems.items():
        in_order = sorted(sorted(_in_source(place, splits) for place in group) for group in groups)
        named = [[splits[name].images.names[row] for _, row, name in group] for group in in_order]
        if named:
            listed = [first(names, _DUPLICATES_SHOWN, " = ") for names in named]
            refuse(problem, listed, fix=fix, shown=_DUPLICATES_SHOWN)


def _in_source(place: RowPosition, splits: Mapping[str, Split]) -> tuple[int, int, str]:
    """What rows are told in the order of: their source's, split by split where it has splits."""
    split = splits[place.split]
    [first, *_] = [number for number, other in enumerate(splits.values()) if other.images is split.images]
    return first, int(split.rows[place.position]), place.split


def drop_duplicates(
    splits: Mapping[str, Split], found: Duplicates
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """The splits without the offending rows, and what was dropped in words.

    An image under several labels goes altogether, for nobody can say which is right; one that is in several
    splits stays in test, or else in validation, so that figures stay comparable.
    """
    conflicting = [place for group in found.conflicting for place in group]
    leaked = [
        place
        for group in found.leaked
        for place in group
        if place.split != min((one.split for one in group), key=_KEPT_FIRST.index)
    ]
    kept = {
        name: split.without([place.position for place in (*conflicting, *leaked) if place.split == name])
        for name, split in splits.items()
    }
    notes = {
        f"dropped {len(conflicting)} rows whose image is also under another label": conflicting,
        f"dropped {len(leaked)} rows whose image is also in another split": leaked,
    }
    return kept, tuple(note for note, dropped in notes.items() if dropped)
