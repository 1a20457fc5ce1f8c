"""The pictures' parts: ticks are round and few, labels do not overlap, everything is escaped."""

from __future__ import annotations

import html.parser
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml.artifacts.interval import Interval
from hpml.reporting import rendering
from hpml.reporting.colours import colour_classes, colour_of_training
from hpml.reporting.format import bounds, duration, plain, shorten
from hpml.reporting.labels import Box, Mark, place_labels
from hpml.reporting.svg import Scale, linear_ticks, log_ticks, node, number, padded, text_width, tick_labels

positive = st.floats(1e-4, 1e6)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_linear_ticks_are_few_and_inside(low: float, width: float, most: int) -> None:
    high = low + max(width, abs(low) * 1e-6)
    ticks = linear_ticks(low, high, most)
    assert len(ticks) <= most
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(positive, st.floats(1.05, 1e5), st.integers(3, 14))
def test_log_ticks_are_few_inside_and_rising(low: float, factor: float, most: int) -> None:
    high = low * factor
    ticks = log_ticks(low, high, most)
    assert len(ticks) <= most
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0.3, 10, 8, ["0.5", "1", "2", "5", "10"]),
        (0.40, 0.47, 6, ["0.40", "0.42", "0.44", "0.46"]),
        (0.001, 1000, 4, ["0.001", "0.1", "10", "1,000"]),
    ],
)
def test_ticks_read_well(low: float, high: float, most: int, expected: list[str]) -> None:
    scale = Scale(low, high, 0, 100, log=True)
    assert tick_labels(scale, scale.ticks(most)) == expected


@given(st.lists(positive, min_size=1, max_size=9), st.booleans())
def test_a_padded_scale_holds_all_values(values: list[float], log: bool) -> None:
    scale = padded(values, 10, 110, log=log)
    assert all(10 <= scale(value) <= 110 for value in values)
    assert scale(scale.low) == pytest.approx(10)
    assert scale(scale.high) == pytest.approx(110)


points = st.lists(st.tuples(st.floats(60, 330), st.floats(40, 280)), min_size=1, max_size=6)


@given(points, st.lists(st.integers(4, 28), min_size=6, max_size=6))
@settings(max_examples=30, deadline=None)
def test_labels_of_six_engines_never_overlap_on_a_phone(
    at: list[tuple[float, float]], lengths: list[int]
) -> None:
    marks = [Mark(x, y, 5, "x" * length) for (x, y), length in zip(at, lengths, strict=False)]
    room = Box(50, 20, 348, 292)
    placed = place_labels(marks, [], room)
    boxes = [place.box for place in placed if place]
    for mark, place in zip(marks, placed, strict=True):
        if place is None:
            continue
        assert place.box.inside(room)
        assert place.box.right - place.box.left == pytest.approx(text_width(mark.name))
        assert all(other.gap(place.box) > 0 for other in marks)
        nearest = min(marks, key=lambda other, box=place.box: other.gap(box))
        assert nearest == mark or place.leader
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_label_rather_crosses_no_line() -> None:
    mark = Mark(90.0, 100.0, 5, "a name")
    [free] = place_labels([mark], [], Box(0, 0, 300, 300))
    assert free
    through = ((free.box.left + 9, 0.0), (free.box.left + 9, 300.0))
    [moved] = place_labels([mark], [through], Box(0, 0, 300, 300))
    assert moved and not moved.box.crossed_by(through)


def test_a_label_without_room_is_left_out_rather_than_laid_over_a_point() -> None:
    marks = [Mark(5.0, 5.0, 5, "a long name")] * 2
    assert place_labels(marks, [], Box(0, 0, 10, 10)) == [None, None]
    assert place_labels([Mark(5, 5, 2)], [], Box(0, 0, 10, 10)) == [None]  # it has none


def test_a_line_through_a_box_is_told_from_one_beside_it() -> None:
    box = Box(10, 10, 20, 20)
    assert box.crossed_by(((0, 0), (30, 30))) and box.crossed_by(((15, 0), (15, 30)))
    assert not box.crossed_by(((0, 15), (30, 60))) and not box.crossed_by(((0, 0), (30, 0)))
    assert not box.crossed_by(((0, 0), (9, 9)))


class _Reader(html.parser.HTMLParser):
    """What a browser reads."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["p", "text", "title", "li"]))
@example("</p><script>x</script>", "p")
@example('"><b', "text")
@example("&lt;&#60;", "li")
def test_whatever_a_text_is_a_picture_shows_it_as_that_text(text: str, tag: str) -> None:
    drawn = rendering.drawing(lambda width: node("svg", node(tag, text=text, class_=text)))
    assert drawn
    reader = _Reader(drawn[0])
    assert reader.elements == [("svg", []), (tag, [("class", text)])]
    assert reader.text == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("</p><script>x</script>")
@example('"><b')
@example("&lt;&#60;")
def test_whatever_a_text_is_a_template_shows_it_as_that_text(text: str) -> None:
    reader = _Reader(str(rendering.macros("reporting/templates/elements.html").legend({text: text})))
    shown = [(tag, attributes) for tag, attributes in reader.elements if tag != "wbr"]
    assert [tag for tag, _ in shown] == ["ul", "li", "span", "span", "span"]
    assert ("span", [("class", f"key {text}")]) in shown
    assert reader.text == f"{text}\n"


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (0.5, "0.5"), (1.239, "1.24"), (10.0, "10")])
def test_coordinates_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.4123, "0.412"), (14.26, "14.3"), (1234.5, "1,234"), (0.0, "0"), (math.inf, "inf")]
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert plain(value) == text


def test_bounds_have_the_decimals_of_the_value() -> None:
    assert bounds(Interval(value=0.41, low=0.39, high=1.2)) == "0.390–1.200"  # noqa: RUF001
    assert bounds(Interval(value=0.981, low=0.97, high=0.99), scale=100, places=1) == "97.0–99.0"  # noqa: RUF001


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.97, "10 s"), (119, "119 s"), (125, "2 min 05 s"), (3600, "60 min 00 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.text(max_size=60), st.integers(3, 40))
def test_a_shortened_name_is_short_and_keeps_its_ends(text: str, length: int) -> None:
    short = shorten(text, length)
    assert len(short) <= length
    assert short == text if len(text) <= length else (short[0], short[-1]) == (text[0], text[-1])


def test_each_engine_has_a_colour_of_its_own_up_to_fifteen() -> None:
    names = ["ref", *(f"v{index}/onnx" for index in range(14))]
    classes = colour_classes(names, reference="ref")
    assert classes["ref"] == "k0"
    assert len(set(classes.values())) == 15


def test_a_training_has_the_colour_of_its_variant() -> None:
    classes = colour_classes(["fp32/eager", "fp32/onnx", "int8/onnx"], reference="fp32/eager")
    assert colour_of_training(["base", "fp32"], classes, reference="fp32/eager") == classes["fp32/onnx"]
    assert colour_of_training(["base"], classes, reference="fp32/eager") == "k0"
    assert colour_of_training(["fp32 distill"], classes, reference="fp32/eager") == classes["fp32/onnx"]
