"""The gate where nothing is decided: errors are judged as a share of the output, whatever its unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.operation import TensorSpec
from hpml.components.export.gate import objections
from hpml.targets import Tolerance, tolerance_of
from hpml.tasks import Metric, Prediction
from hpml.tasks.judging import Judgement, judge


class Price(Prediction):
    """`x` is the price."""

    metrics = (Metric("mae", "MAE", better="lower"),)
    task: str = "price"

    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="x", shape=("batch",)),)

    def answers(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="price", shape=("batch",)),)

    def loss(self, outputs: Any, stored: Any, *, label_smoothing: float) -> Any:
        return (outputs - stored["x"]).abs().mean()

    def statistics(self, outputs: Any, stored: Any) -> dict[str, Any]:
        error = (outputs - stored["x"]).abs() + 1
        return {"mae": error[:, None] * error.new_tensor([1, 0]) + error.new_tensor([0, 1])}


class Answers:
    """Answers the price, off by a share of it."""

    def __init__(self, off: float) -> None:
        self._off = off

    def run(self, feeds: Mapping[str, Any], operation: str = "predict") -> dict[str, Any]:
        return {"price": feeds["x"] * np.float32(1 + self._off)}


def judged(off: float, size: float) -> tuple[Judgement, Judgement]:
    stored = {"x": np.linspace(-size, size, 1001, dtype="float32")}
    reference, engines = judge(Price(), Answers(0), {"engine": Answers(off)}, stored)
    return engines["engine"], reference


@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0, 5e5])
def test_the_unit_makes_no_difference(size: float) -> None:
    tolerance = tolerance_of("fp32", Tolerance(max_quality_loss=1e9), Price(), decides=False)
    for off, refused in ((2e-6, False), (1e-3, True)):
        engine, reference = judged(off, size)
        assert engine.agreement is None
        assert engine.relative_error == pytest.approx(off, rel=0.05)
        assert (
            "off by 0.10% of its size, allowed 0.01%" in objections(Price(), engine, reference, tolerance)
        ) is refused


def test_an_answer_that_is_no_number_is_refused() -> None:
    engine, reference = judged(float("nan"), 1.0)
    assert "of its size" in objections(
        Price(), engine, reference, tolerance_of("int8", Tolerance(), Price(), decides=False)
    )


def test_what_a_recipe_says_comes_first() -> None:
    given = Tolerance(max_abs_error=5.0)
    assert tolerance_of("fp32", given, Price(), decides=False).max_abs_error == 5.0
    assert tolerance_of("fp32", Tolerance(), Price(), decides=False).max_abs_error is None
    assert tolerance_of("fp32", Tolerance(), Price(), decides=True).max_abs_error == 1e-3
    assert (
        tolerance_of("int8", Tolerance(max_relative_error=0.02), Price(), decides=False).max_relative_error
        == 0.02
    )


def test_how_often_an_int8_engine_has_to_decide_as_its_network_is_the_tasks() -> None:
    lenient = type("Lenient", (Price,), {"int8_agreement": 0.5})()
    assert tolerance_of("int8", Tolerance(), lenient, decides=True).min_agreement == 0.5
    assert tolerance_of("int8", Tolerance(min_agreement=0.9), lenient, decides=True).min_agreement == 0.9
    assert tolerance_of("fp32", Tolerance(), lenient, decides=True).min_agreement == 0.999
