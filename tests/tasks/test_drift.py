"""The population stability index, and what is counted for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.errors import StageFailed
from hpml.tasks.drift.baseline import DriftReference, _bins, read_reference
from hpml.tasks.drift.index import Bins, Counter
from hpml.tasks.drift.live import Drift
from hpml.tasks.drift.observed import of_arrays, of_logits

CHANCE = np.random.default_rng(0)
OPERATION = Operation(inputs=(TensorSpec(name="x", shape=("batch", 2)),), outputs=())


def bins_of(values: Any) -> Bins:
    found = _bins(np.asarray(values))
    assert found
    return found


def index(reference: Any, now: Any) -> float:
    counter = Counter(bins_of(reference))
    counter.add(np.asarray(now), keep=1.0)
    return counter.psi


def test_the_index_is_that_of_the_textbook() -> None:
    counter = Counter(Bins(edges=(0.0,), counts=(50, 50)))
    counter.add(np.r_[np.full(80, -1.0), np.full(20, 1.0)], keep=1.0)
    p, q = np.array([80.5, 20.5]) / 101, np.array([50.5, 50.5]) / 101
    assert counter.psi == pytest.approx(((p - q) * np.log(p / q)).sum())
    assert counter.psi == pytest.approx(0.416, abs=0.01)  # (0.8 - 0.5) ln 1.6 + (0.2 - 0.5) ln 0.4


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: CHANCE.normal(size=n),
        lambda n: CHANCE.integers(0, 10, n),
        lambda n: CHANCE.zipf(1.3, n).clip(max=5_000),
        lambda n: np.round(CHANCE.exponential(3, n)),
        lambda n: np.full(n, 7.0),
    ],
)
def test_without_a_change_it_is_near_zero(draw: Any) -> None:
    assert index(draw(1000), draw(1000)) < 0.1


def test_with_a_change_it_is_large() -> None:
    numbers = CHANCE.normal(size=1000)
    assert index(numbers, numbers + 0.6) > 0.25
    assert index(numbers, numbers * 3) > 0.25
    assert index(np.full(1000, 7.0), np.full(1000, 6.0)) > 0.25
    assert index(CHANCE.integers(0, 10, 1000), CHANCE.integers(0, 4, 1000)) > 0.25
    assert index(CHANCE.integers(0, 10, 1000), np.full(1000, 99)) > 0.25  # of no class there was
    assert index(CHANCE.integers(0, 10, 1000), np.full(1000, -1)) > 0.25


def test_bins_have_as_many_values_each_as_there_are() -> None:
    numbers = bins_of(np.arange(1000.0))
    assert np.allclose(numbers.counts, (0, *[100] * 10, 0), atol=1)
    assert len(bins_of(np.arange(60.0)).counts) == 3 + 2
    assert _bins(np.arange(39.0)) is None
    many = bins_of(np.repeat(np.arange(500), np.arange(500)))
    assert len(many.counts) <= 11
    assert max(many.counts[:-1]) < 0.2 * sum(many.counts)
    assert many.bin_of[499] == 0  # the most frequent
    assert many.bin_of[0] == len(many.counts) - 1  # never there


def test_what_is_counted_of_arrays() -> None:
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    found = of_arrays({"x": table, "ids": np.arange(160).reshape(2, 80)}, {"y": table[:, :1], "z": table})
    assert [*found] == ["x[0]", "x[1]", "x[2]", "ids", "y"]
    assert found["ids"].shape == (160,)
    assert [*of_arrays({"p": np.zeros((2, 3, 4, 4), np.float32)}, {"y": table[:, 0]})] == [
        "mean of p",
        "deviation of p",
        "y",
    ]


def test_what_is_counted_of_logits() -> None:
    found = of_logits(np.log(np.array([[0.2, 0.5, 0.3], [0.9, 0.05, 0.05]], np.float32)), "class")
    assert found["class"].tolist() == [1, 0]
    assert np.allclose(found["probability of the class"], [0.5, 0.9])


def drift() -> Drift:
    values = np.random.default_rng(1).normal(size=(1000, 2))
    bins = {f"x[{column}]": bins_of(values[:, column]) for column in range(2)}
    made = Drift(DriftReference(operation="predict", bins=bins), of_arrays)
    return made


def count(made: Drift, x: np.ndarray) -> None:
    for row in x:
        made._count({"x": row[None]}, {"y": row[None]})


def test_only_the_latest_rows_count() -> None:
    made, same = drift(), np.random.default_rng(2).normal(size=(3000, 2))
    count(made, same[:150])
    assert not made.indices()  # of too few
    count(made, same)
    assert max(made.indices().values()) < 0.1
    assert made.rows < 1001
    count(made, same + np.array([0, 1]))
    told = made.indices()
    assert told["x[0]"] < 0.1
    assert told["x[1]"] > 0.25


def test_counting_takes_its_share_of_the_time_and_fails_without_harm() -> None:
    made = drift()
    x = {"x": np.zeros((1, 2))}
    for _ in range(10_000):
        made.add("predict", x, {"y": x["x"]})
    assert 0 < made.rows < 1000
    made.add("other", x, x)
    broken = Drift(DriftReference(operation="predict", bins={"x[0]": bins_of(np.arange(100.0))}), of_arrays)
    broken.add("predict", {}, {})
    assert broken.failures == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"operation": "other", "bins": {}}',
        '{"operation": "predict", "bins": {"a": {"edges": [1, 1], "counts": [1, 1, 1]}}}',
        '{"operation": "predict", "bins": {"a": {"edges": [1], "counts": [1, 1, 1]}}}',
        '{"operation": "predict", "bins": {"a": {"bin_of": [3], "counts": [1, 1]}}}',
        '{"operation": "predict", "bins": {"a": {"edges": [NaN], "counts": [1, 1]}}}',
    ],
)
def test_a_reference_that_is_none_is_refused_in_a_line(tmp_path: Path, content: str) -> None:
    assert read_reference(tmp_path, [OPERATION]) is None
    (tmp_path / "drift.json").write_text(content)
    with pytest.raises(StageFailed, match="cannot be used") as refused:
        read_reference(tmp_path, [OPERATION])
    assert "\n" not in str(refused.value)
