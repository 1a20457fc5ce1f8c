"""Outputs of engines side by side: what differs, what is no number, what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.measuring import outputs
from hpml.measuring.subjects import OnnxSubject, ServerSubject, TorchSubject
from hpml.measuring.subjects.tensors import parse_input
from hpml.pipelines.command_pages.tables import differing, output_rows, outputs_in_words
from tests.small_subjects import MODEL_OF_THE_USER, inference_server, write_image_model, write_text_model


def answers(*arrays: Any, name: str = "logits") -> outputs.Answers:
    return [{name: np.asarray(array)} for array in arrays]


def test_differences_are_the_largest_over_all_requests() -> None:
    expected = answers([[1.0, -4.0]], [[0.0, 2.0]])
    found = outputs.compare(answers([[1.0, -4.5]], [[3.0, 2.0]]), expected)
    [one] = found.outputs
    assert (found.requests, one.numbers, one.nan, one.reason) == (2, 4, 0, "")
    assert one.max_abs_difference == 3.0 and one.max_rel_difference == 0.75 and one.top1_agreement == 0.5


def test_what_is_not_finite_is_counted_and_the_rest_is_compared() -> None:
    expected = answers([[1.0, 2.0, 3.0]])
    [one] = outputs.compare(answers([[np.nan, -np.inf, 3.5]]), expected).outputs
    assert (one.nan, one.infinite, one.max_abs_difference, one.top1_agreement) == (1, 1, 0.5, 0.0)
    [of_reference] = outputs.compare(
        answers([[np.nan, 1.0]]), answers([[np.nan, 1.0]]), is_reference=True
    ).outputs
    assert of_reference.nan == 1 and of_reference.max_abs_difference is None


def test_numbers_at_the_end_of_their_range_are_compared() -> None:
    huge = np.finfo(np.float64).max
    [one] = outputs.compare(answers([[huge, 1.0]]), answers([[-huge, 1.0]])).outputs
    assert one.max_abs_difference == huge


@pytest.mark.parametrize(
    ("own", "expected", "why"),
    [
        (answers([[1.0, 2.0]]), answers([[1.0, 2.0, 3.0]]), r"shape is \(1, 2\), the reference's \(1, 3\)"),
        ([{"labels": None}], answers([[1.0]], name="labels"), "no array of numbers"),
        ([], answers([[1.0]]), "no arrays of numbers"),
    ],
)
def test_what_cannot_be_compared_is_said(own: Any, expected: Any, why: str) -> None:
    found = {"b": outputs.compare(own, expected)}
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(outputs_in_words(found, "a"))


def test_outputs_go_by_name_and_those_of_other_names_by_place() -> None:
    own = [{"scores": np.ones((1, 2)), "boxes": np.zeros((1, 4))}]
    expected = [{"boxes": np.zeros((1, 4)), "logits": np.ones((1, 2))}]
    rows = output_rows({"a": outputs.compare(expected, expected), "b": outputs.compare(own, expected)}, "a")
    assert [(row["output"].text, row["max diff."].text) for row in rows] == [
        ("scores (logits)", "0"),
        ("boxes", "0"),
    ]
    [extra, lacking] = (
        outputs.compare([{"boxes": np.zeros(1), "more": np.zeros(1)}], answers([1.0], name="boxes")).outputs[
            1:
        ]
        + outputs.compare(
            answers([1.0], name="boxes"), [{"boxes": np.zeros(1), "more": np.zeros(1)}]
        ).outputs[1:]
    )
    assert "no such output, it has boxes" in extra.reason and "only the reference" in lacking.reason


@pytest.mark.parametrize(
    ("own", "expected", "verdict"),
    [
        ([[100.0, 50.5]], [[100.0, 50.0]], "same"),  # 0.5 % of the largest
        ([[100.0, 52.0]], [[100.0, 50.0]], "differs"),
        ([[np.nan, 50.0]], [[100.0, 50.0]], "not finite"),
        ([[np.nan, 50.0]], [[np.nan, 50.0]], "same"),
        ([[np.inf, 50.0]], [[-np.inf, 50.0]], "not finite"),
        ([[np.nan]], [[np.nan]], "not finite"),
        ([[1.0, 50.0]], [[np.nan, 50.0]], "differs"),
        ([[0.0, 0.1]], [[0.0, 0.0]], "differs"),
        ([[1000, 1001]], [[1000, 1000]], "differs"),  # whole numbers: 0.1 % is another class
        ([[1000, 7]], [[1000, 7]], "same"),
        ([[1.0]], [[1.0, 2.0]], "not compared"),
    ],
)
def test_the_verdict_on_an_output(own: Any, expected: Any, verdict: str) -> None:
    [one] = outputs.compare(answers(own), answers(expected)).outputs
    assert one.verdict(0.01) == verdict


def test_larger_batches_have_a_verdict_of_their_own() -> None:
    expected = {1: answers([[1.0, 2.0]]), 4: answers([[1.0, 2.0]] * 4)}
    own = {1: answers([[1.0, 2.0]]), 4: answers([[1.0, 2.0]] * 3 + [[9.0, 2.0]])}
    found = {"a": outputs.compare_batches(expected, expected), "b": outputs.compare_batches(own, expected)}
    assert [row["verdict"].text for row in output_rows(found, "a")] == ["same", "differs"]
    assert differing(found, "a", 0.01) == {"b": ["'logits' at batch 4"]}
    assert found["b"].batched == {4: 1} and found["b"].outputs[1].top1_agreement == 0.75
    assert "b does not answer as a does, in 'logits' at batch 4." in outputs_in_words(found, "a")


def written(subject: Any, tmp_path: Path, sizes: dict[str, int] | None = None) -> outputs.Batched:
    """What a subject answers, by way of the file."""
    subject = subject.model_copy(update={"inputs": subject.signature(sizes or {}).inputs})
    arrays = {tensor.array: tensor.draw(3, seed=0) for tensor in subject.inputs}
    opened = subject.open(threads=1)
    told = outputs.write(opened.outputs, arrays, tmp_path / "o.npz", requests=[(1, 64), (2, 4)], seconds=60)
    return outputs._read(tmp_path / "o.npz", told["names"])


def test_each_kind_of_subject_tells_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = written(OnnxSubject(file=write_image_model(tmp_path / "m.onnx")), tmp_path)
    assert [answer["logits"].shape for answer in logits[1]] == [(1, 5)] * 3
    assert [answer["logits"].shape for answer in logits[2]] == [(2, 5)] * 2  # of 3 rows: the first again
    assert np.allclose(logits[2][1]["logits"][1], logits[1][0]["logits"][0], atol=1e-5)
    [pooled, *_] = written(OnnxSubject(file=write_text_model(tmp_path / "t.onnx")), tmp_path, {"seq": 7})[1]
    assert pooled["pooled"].shape == (1, 8)
    with inference_server(extensions=("binary_tensor_data",)) as server:
        sums = written(ServerSubject(url=server.url, model="sum"), tmp_path)
    assert len(sums[1]) == 3 and sums[1][0]["sum"].dtype == np.float32
    (tmp_path / "nets_with_outputs.py").write_text(MODEL_OF_THE_USER)
    monkeypatch.syspath_prepend(tmp_path)
    subject = TorchSubject(path="nets_with_outputs:small", inputs=(parse_input("3x4x4", 0),))
    assert written(subject, tmp_path)[1][0]["output"].shape == (1, 5)
