"""Names beside the points of a picture: clear of all points and of each other, and each at its own point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import tee
from xml.etree.ElementTree import Element

from hpml.reporting.svg import label, line, text_width

_LINE_PX = 15
_BESIDE_PX = 12.0  # at most so far from its point, a name needs no line to it
_NEARER_PX = 5.0  # by so much, if no other point is so near
_FAR_PX = 10.0  # a place anywhere is as bad as one beside the point that is so much further away
_GRID_PX = (12, 8)  # between the places that are tried where there is no room beside the point
_CROSSING_PX = 15.0  # crossing a line of the picture is as bad as being so much further away

Spot = tuple[float, float]
Segment = tuple[Spot, Spot]


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def of_text(cls, text: str, x: float, y: float, *, anchor: str = "start") -> Box:
        """About what `label` covers with the same arguments."""
        width = text_width(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        return cls(left, y - _LINE_PX + 4, left + width, y + 4)

    def overlaps(self, other: Box) -> bool:
        """Whether the two have an area in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def larger(self, *, by: float) -> Box:
        """With so much more on each side."""
        return Box(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def inside(self, other: Box) -> bool:
        """Whether it lies within `other`."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom

    def nearest(self, x: float, y: float) -> Spot:
        """The point of it that is nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def crossed_by(self, segment: Segment) -> bool:
        """Whether a straight line enters it (Liang and Barsky's clipping)."""
        (x, y), (end_x, end_y) = segment
        enters, leaves = 0.0, 1.0
        for start, step, low, high in (
            (x, end_x - x, self.left, self.right),
            (y, end_y - y, self.top, self.bottom),
        ):
            if not step:
                if not low < start < high:
                    return False
                continue
            one, other = sorted(((low - start) / step, (high - start) / step))
            enters, leaves = max(enters, one), min(leaves, other)
        return enters < leaves


@dataclass(frozen=True)
class Mark:
    """A dot, and the name it is to have; empty for none."""

    x: float
    y: float
    radius: float
    name: str = ""

    def gap(self, box: Box) -> float:
        """How far its edge is from `box`; negative where they overlap."""
        x, y = box.nearest(self.x, self.y)
        return math.hypot(x - self.x, y - self.y) - self.radius

    def touches(self, other: Mark) -> bool:
        """Whether the two overlap."""
        return math.hypot(self.x - other.x, self.y - other.y) < self.radius + other.radius


@dataclass(frozen=True)
class Placed:
    """Where a name stands, and the line from its point if that needs one."""

    box: Box
    leader: Segment | None


def place_labels(
    marks: Sequence[Mark], lines: Sequence[Segment], bounds: Box, avoid: Sequence[Box] = ()
) -> list[Placed | None]:
    """A place within `bounds` for the name of each mark; None for a mark without one.

    No name covers a mark, another name or a line to one. A name is nearest to its own mark, or a line leads
    to it that passes over no other mark and no name. As far as may be it is near, covers none of `avoid`, and
    crosses none of `lines`. A name for which there is no such place is left out: None, too.
    """
    order = [index for index, mark in enumerate(marks) if mark.name]
    places = {index: tee(_places(index, marks, lines, bounds, avoid), 1)[0] for index in order}
    placed: dict[int, Placed] = {}
    for strictness in (2, 1, 0):
        for _ in range(len(order)):
            placed = {}
            for index in order:
                known = copy(places[index])  # they are made when they are asked for, once
                place = _place(index, marks, list(placed.values()), known, strictness)
                if place:
                    placed[index] = place
            without = [index for index in order if index not in placed]
            if not without:
                break
            order = without + [index for index in order if index in placed]  # first come, first served
        if len(placed) == len(order):
            break
    return [placed.get(index) for index in range(len(marks))]


@dataclass(frozen=True)
class _Slot:
    """Where a name could stand if it were the only one.

    gap: to its mark. others: to the nearest other mark. hidden: how many boxes it covers that it should not.
    """

    box: Box
    gap: float
    others: float
    hidden: int
    cost: float


def _place(
    index: int, marks: Sequence[Mark], placed: Sequence[Placed], places: Iterable[_Slot], strictness: int
) -> Placed | None:
    """The best of `places`, the nearest first, for the name of mark `index`.

    strictness: 2 all of it; 1: `avoid` may be covered; 0: lines to names may also cross each other.
    """
    best, best_cost = None, math.inf
    for place in places:
        if place.gap >= best_cost:
            break  # those that follow are further away
        if place.cost >= best_cost or (place.hidden and strictness == 2):
            continue
        if any(place.box.overlaps(other.box) for other in placed):
            continue
        around = place.box.larger(by=2)
        if any(other.leader and around.crossed_by(other.leader) for other in placed):
            continue
        leader = None
        if place.gap > _BESIDE_PX or place.others < place.gap + _NEARER_PX:
            leader = _leader(marks[index], place.box)
            if not _is_clear(leader, index, marks, placed, strictness):
                continue
        best, best_cost = Placed(place.box, leader), place.cost
    return best


def _places(
    index: int, marks: Sequence[Mark], lines: Sequence[Segment], bounds: Box, avoid: Sequence[Box]
) -> Iterator[_Slot]:
    """Within `bounds` and clear of all marks, the nearest first."""
    for gap, inconvenience, box in _candidates(marks[index], bounds):
        if not box.inside(bounds):
            continue
        gaps = [mark.gap(box) for mark in marks]
        if min(gaps) < 2:
            continue
        others = min((other for at, other in enumerate(gaps) if at != index), default=math.inf)
        hidden = sum(box.overlaps(other) for other in avoid)
        crossed = sum(map(box.crossed_by, lines))
        cost = gap + inconvenience + _CROSSING_PX * (crossed + 2 * hidden)
        yield _Slot(box, gap, others, hidden, cost)


def _candidates(mark: Mark, bounds: Box) -> Iterator[tuple[float, float, Box]]:
    """(gap, inconvenience, box) of places beside the mark and all over `bounds`, the nearest first."""
    width = text_width(mark.name)
    near = []
    for step in (3.0, 8.0):
        for right, down in ((1, 0), (-1, 0), (1, -1), (-1, -1), (1, 1), (-1, 1), (0, -1), (0, 1)):
            away = mark.radius + step - (0.3 * mark.radius if right and down else 0)
            centre = (mark.x + right * (away + width / 2), mark.y + down * (away + _LINE_PX / 2))
            near.append((0.0, _box(*centre, width)))
    far = [
        (_FAR_PX, _box(bounds.left + column + width / 2, bounds.top + row + _LINE_PX / 2, width))
        for column in range(0, max(1, int(bounds.right - bounds.left - width)), _GRID_PX[0])
        for row in range(0, max(1, int(bounds.bottom - bounds.top - _LINE_PX)), _GRID_PX[1])
    ]
    boxes = [(mark.gap(box), inconvenience, box) for inconvenience, box in near + far]
    yield from sorted(boxes, key=lambda item: item[0])


def _box(x: float, y: float, width: float) -> Box:
    return Box(x - width / 2, y - _LINE_PX / 2, x + width / 2, y + _LINE_PX / 2)


def _leader(mark: Mark, box: Box) -> Segment:
    """From the edge of a mark to the nearest point of its name."""
    x, y = box.nearest(mark.x, mark.y)
    length = math.hypot(x - mark.x, y - mark.y)
    share = mark.radius / length
    return (mark.x + share * (x - mark.x), mark.y + share * (y - mark.y)), (x, y)


def _is_clear(
    leader: Segment, index: int, marks: Sequence[Mark], placed: Iterable[Placed], strictness: int
) -> bool:
    """Whether a line to a name passes over no other mark, no name and, if strict, no other such line.

    Where marks overlap, it begins where no other is nearer.
    """
    for at, other in enumerate(marks):
        if at != index and _distance(other.x, other.y, leader) < other.radius + 1:
            own = marks[index]
            begins = math.dist(leader[0], (other.x, other.y)) - other.radius
            if not own.touches(other) or begins < min(0.0, math.dist((own.x, own.y), (other.x, other.y)) - 8):
                return False
    for item in placed:
        if item.box.larger(by=2).crossed_by(leader):
            return False
        if strictness and item.leader and _cross(leader, item.leader):
            return False
    return True


def _distance(x: float, y: float, segment: Segment) -> float:
    """From (x, y) to a straight line."""
    (start_x, start_y), (end_x, end_y) = segment
    step_x, step_y = end_x - start_x, end_y - start_y
    squared = step_x**2 + step_y**2
    share = ((x - start_x) * step_x + (y - start_y) * step_y) / squared if squared else 0.0
    share = min(1.0, max(0.0, share))
    return math.hypot(start_x + share * step_x - x, start_y + share * step_y - y)


def _cross(one: Segment, other: Segment) -> bool:
    def side(segment: Segment, spot: Spot) -> float:
        (x1, y1), (x2, y2) = segment
        return (x2 - x1) * (spot[1] - y1) - (y2 - y1) * (spot[0] - x1)

    return side(one, other[0]) * side(one, other[1]) < 0 and side(other, one[0]) * side(other, one[1]) < 0


def drawn_labels(
    marks: Sequence[Mark], placed: Sequence[Placed | None], classes: Sequence[str], strong: str = ""
) -> list[Element]:
    """The names, and the lines to them in the colours of the marks. strong: the name that stands out."""
    leaders: list[Element] = []
    names = []
    for mark, place, class_ in zip(marks, placed, classes, strict=True):
        if place is None:
            continue
        if place.leader:
            (x1, y1), (x2, y2) = place.leader
            leaders.append(line(x1, y1, x2, y2, f"leader {class_}"))
        style = "name strong" if mark.name == strong else "name"
        x, anchor = _towards(mark, place.box)
        names.append(label(mark.name, x, place.box.bottom - 4, style, anchor=anchor))
    return [*leaders, *names]


def _towards(mark: Mark, box: Box) -> tuple[float, str]:
    """Where in its box a name begins, is centred, or ends: letters may need less room than was kept."""
    if box.left >= mark.x:
        return box.left, "start"
    if box.right <= mark.x:
        return box.right, "end"
    return (box.left + box.right) / 2, "middle"
