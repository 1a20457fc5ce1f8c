"""The section on the quality of labelled images: words follow McNemar's test, many classes stay narrow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from hpml.artifacts.measurements import PairedQuality
from hpml.components.report.content import Content, gather
from hpml.components.report.page import parts_of
from hpml.measuring.goals import Goals
from hpml.measuring.quality import paired_quality
from tests.html_elements import parsed
from tests.image_tasks import judgement_of_logits

MakeRun = Callable[..., Any]
ROWS = 1000
HOSTILE = '"><script>alert(1)</script>'


def _paired(classes: int, *, gained: int, lost: int, seed: int = 0) -> PairedQuality:
    """Of logits where the reference errs on 20 samples and the engine gains and loses some."""
    rng = np.random.default_rng(seed)
    labels = np.arange(ROWS) % classes
    order = rng.permutation(ROWS)
    reference_wrong, fixed = order[:20], order[:gained]
    reference = _logits(labels, reference_wrong, classes)
    engine = _logits(
        labels, np.concatenate([np.setdiff1d(reference_wrong, fixed), order[20 : 20 + lost]]), classes
    )
    return _compared(engine, reference, labels)


def _compared(engine: np.ndarray, reference: np.ndarray, labels: np.ndarray) -> PairedQuality:
    return paired_quality(judgement_of_logits(engine, labels), judgement_of_logits(reference, labels), labels)


def _logits(labels: np.ndarray, wrong: np.ndarray, classes: int) -> np.ndarray:
    said = labels.copy()
    said[wrong] = (said[wrong] + 1) % classes
    return np.eye(classes, dtype=np.float32)[said]


def content_with(made: Any, paired: dict[str, PairedQuality], class_names: tuple[str, ...]) -> Content:
    """The content of a run whose engines are paired with the reference like this."""
    content = gather(Goals(), **made.inputs)
    engines = {
        name: engine.model_copy(update={"paired": paired.get(name)})
        for name, engine in content.measurements.engines.items()
    }
    counts = tuple(int(count) for count in np.bincount(np.arange(ROWS) % len(class_names)))
    validation = content.data.splits["validation"].model_copy(update={"class_counts": counts})
    task = {**content.data.task, "class_names": list(class_names)}
    data = content.data.model_copy(update={"task": task, "splits": {"validation": validation}})
    measurements = content.measurements.model_copy(update={"engines": engines})
    return replace(content, measurements=measurements, data=data)


def _section(content: Content) -> Element | None:
    html = parts_of(content).quality()
    return parsed(html) if html.strip() else None


@pytest.fixture
def section(make_run: MakeRun) -> Callable[..., Element]:
    """section(paired, class_names): of the quickstart's engines."""

    def make(paired: dict[str, PairedQuality], class_names: tuple[str, ...]) -> Element:
        found = _section(content_with(make_run(), paired, class_names))
        assert found is not None
        return found

    return make


def _rows(section: Element) -> list[str]:
    return ["".join(row.itertext()) for row in section.findall(".//tbody/tr")]


DIGITS = tuple("0123456789")


def test_each_engine_is_judged_in_words(section: Any) -> None:
    found = section(
        {
            "fp32/onnx": _paired(10, gained=0, lost=0),
            "int8/onnx": _paired(10, gained=4, lost=6),
            "pruned+distilled/onnx": _paired(10, gained=2, lost=15),
            "pruned+distilled+int8/onnx": _paired(10, gained=12, lost=1),
        },
        DIGITS,
    )
    reference, same, tied, worse, better = _rows(found)
    assert reference.startswith("fp32/eager") and "the reference" in reference
    assert "0.00-0.38 to +0.38" in same.replace("−", "-")  # noqa: RUF001
    assert "100.0 %" in same and "right on the same 1,000 samples" in same
    assert "-0.20" in tied.replace("−", "-")  # noqa: RUF001
    assert "no difference that 1,000 samples can show4 gained, 6 lost, p = 0.75" in tied
    assert "worse than the reference2 gained, 15 lost, p = 0.002" in worse
    assert "better than the reference12 gained, 1 lost, p = 0.003" in better
    assert "+1.10" in better


def test_what_the_export_compared_is_told_where_outputs_were_not_kept(section: Any) -> None:
    """Of language models they are too large."""
    not_kept = {"agreement": None, "max_abs_error": None}
    paired = _paired(10, gained=4, lost=6).model_copy(update=not_kept)
    [row] = (row for row in _rows(section({"int8/onnx": paired}, DIGITS)) if row.startswith("int8/onnx"))
    assert "99.8 %" in row


def test_the_picture_has_every_figure_of_every_class_for_desktop_and_phone(section: Any) -> None:
    paired = {"fp32/onnx": _paired(10, gained=0, lost=0), "int8/onnx": _paired(10, gained=0, lost=100)}
    found = section(paired, DIGITS)
    for picture in found.findall(".//svg"):
        texts = [text.text for text in picture.findall("text")]
        for name, one in paired.items():
            assert name in texts
            for share in one.groups:
                assert f"{100 * share.value:.0f}" in texts
        shades = [float(rect.get("fill-opacity", "nan")) for rect in picture.findall("rect")]
        assert len(shades) == 20
        assert 0 <= min(shades) < max(shades) == pytest.approx(0.4)
    assert len(found.findall(".//svg")) == 2


def test_of_many_classes_the_ten_worst_are_shown(section: Any) -> None:
    names = tuple(f"class {index}" for index in range(100))
    one = _paired(100, gained=0, lost=30)
    found = section({"int8/onnx": one}, names)
    assert "the 10 worst of 100" in "".join(found.itertext())
    picture = found.findall(".//svg")[0]
    shown = {text.text for text in picture.findall("text")} & set(names)
    assert len(shown) == 10
    worst = sorted(interval.value for interval in one.groups)[:10]
    assert sorted(one.groups[names.index(name)].value for name in shown) == worst


def test_where_nothing_is_wrong_nothing_is_dark(section: Any) -> None:
    labels = np.arange(ROWS) % 10
    right = np.eye(10, dtype=np.float32)[labels]
    found = section({"int8/onnx": _compared(right, right, labels)}, DIGITS)
    assert {rect.get("fill-opacity") for rect in found.findall(".//rect")} == {"0.000"}


def test_hostile_class_names_stay_text(section: Any) -> None:
    found = section({"int8/onnx": _paired(3, gained=1, lost=1)}, (HOSTILE, HOSTILE + "1", "c"))
    assert found.find(".//script") is None


def test_without_a_comparison_there_is_no_section(make_run: MakeRun) -> None:
    assert _section(content_with(make_run(), {}, DIGITS)) is None
