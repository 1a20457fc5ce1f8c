"""Labels as sources have them, numbers or names, and the classes that they are of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpml.core.errors import StageFailed
from hpml.tasks.image_classification.data.checks import refuse

MOST_CLASSES = 100_000  # a column of captions or of keys is none of labels


class ClassLabels:
    """Collects labels, which may be numbers from 0 or names, and tells the class of each.

    class_names: where they are known beforehand, in the order of their numbers; else the names are those that
    are met, sorted, or the numbers themselves.
    """

    def __init__(self, class_names: Sequence[str] = ()) -> None:
        self._given = tuple(class_names)
        self._codes: dict[int | str, int] = {}
        self._met = 0
        self.class_names: tuple[str, ...] = self._given

    def code(self, label: int | str) -> int:
        """A number for a label, until all are known. Raises StageFailed if too many differ."""
        self._met += 1
        code = self._codes.setdefault(label, len(self._codes))
        if code >= MOST_CLASSES:
            raise StageFailed(
                f"the data has more than {MOST_CLASSES} different labels",
                why=f"such as {', '.join(repr(label)[:40] for label in list(self._codes)[:3])}",
                fix="name what holds the labels under `data`: `label_column` or `label_field`",
            )
        return code

    def resolve(self) -> None:
        """All labels have been met: name the classes. Raises StageFailed if the labels do not fit them."""
        numbers = [label for label in self._codes if isinstance(label, int)]
        names = [label for label in self._codes if isinstance(label, str)]
        if numbers and names and not self._given:
            raise StageFailed(
                "some labels are numbers and some are names",
                why=f"such as {numbers[0]} and {names[0]!r}",
                fix="set `class_names` under `data`, in the order of the numbers",
            )
        if self._given:
            unknown = [repr(name) for name in names if name not in self._given]
            if unknown:
                refuse("labels are none of its class names", unknown, fix="correct them", unit="label")
        elif names:
            self.class_names = tuple(sorted(names))
        else:
            high = [str(number) for number in numbers if number >= self._met]
            if high:  # a stray label does not make a million names
                refuse(
                    "labels are higher than there are rows",
                    high,
                    fix="number the classes from 0",
                    unit="label",
                )
            self.class_names = tuple(map(str, range(max(numbers, default=-1) + 1)))
        place = {name: number for number, name in enumerate(self.class_names)}
        self._number_of_code = np.array(
            [place[label] if isinstance(label, str) else label for label in self._codes], np.int64
        )

    def numbers(self, codes: Sequence[int]) -> NDArray[np.int64]:
        """The classes of labels by the codes that they were given."""
        return self._number_of_code[np.asarray(codes, np.int64)]


def label_of(text: str) -> int | str:
    """A label that is written: a number if it is one."""
    text = text.strip()
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else text
