"""A user's own task: where its class may come from, and what is refused of its arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpml.components.prepare import stage as prepare
from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.tasks import task_of
from hpml.tasks.custom.own_data import Custom
from hpml.tasks.prepared_splits import write_splits

HEAD = """
import numpy as np
from hpml.artifacts.operation import TensorSpec
from hpml.tasks import CustomTask, Metric

class Doubled(CustomTask):
    metrics = (Metric("mae", "MAE", better="lower"),)
    largest: float

    @classmethod
    def facts(cls, train):
        return {"largest": float(train["x"].max())}

    def inputs(self):
        return (TensorSpec(name="x", shape=("batch", 2)),)

    def answers(self):
        return (TensorSpec(name="y", shape=("batch",)),)

    def loss(self, outputs, stored, *, label_smoothing):
        return (outputs - stored["y"]).abs().mean()

    def statistics(self, outputs, stored):
        error = (outputs - stored["y"]).abs()
        return {"mae": error.new_ones(len(error), 2) * error[:, None]}
"""
LOADS = """
    @classmethod
    def load(cls, path, options):
        x = np.arange(2 * options["rows"], dtype="float32").reshape(-1, 2)
        return {"train": {"x": x, "y": 2 * x[:, 0]}}
"""

Write = Callable[[str], None]


@pytest.fixture
def doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the module `doubled` into a folder that a run names."""
    monkeypatch.setenv("HPML_IMPORT_PATHS", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> None:
        (tmp_path / "doubled.py").write_text(code)
        monkeypatch.delitem(sys.modules, "doubled", raising=False)

    return write


def made(tmp_path: Path, task: str = "doubled:Doubled", **fields: Any) -> Any:
    out = Output(tmp_path / "out", tmp_path)
    out.path.mkdir()
    return prepare.run(Custom(task=task, options={"rows": 20}, **fields), out=out).spec


def test_what_it_loads_is_split_with_the_facts_of_the_training_rows(tmp_path: Path, doubled: Write) -> None:
    doubled(HEAD + LOADS)
    spec = made(tmp_path)
    assert {name: split.rows for name, split in spec.splits.items()} == {
        "train": 14,
        "validation": 2,
        "test": 4,
    }
    parts = [np.load(tmp_path / "out" / f"{name}_x.npy") for name in spec.splits]
    assert sorted(np.concatenate(parts)[:, 0]) == list(range(0, 40, 2))
    assert spec.task == {"task": "doubled:Doubled", "largest": float(parts[0].max())}
    task = task_of(spec.task)
    assert task.example(3)[0].shape == (3, 2)
    zeros, twos = torch.zeros(4), torch.full((4,), 2.0)
    assert task.soft_loss(zeros, twos, {}, temperature=4.0) == 4.0


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ("    def inputs", "    def inputsss", ConfigInvalid, "is not whole: it lacks inputs"),
        ("class Doubled", "class Halved", ConfigInvalid, "cannot import the task 'doubled:Doubled'"),
        ("(CustomTask)", "", ConfigInvalid, "is not a task"),
        ('options["rows"]', 'options["row"]', ConfigInvalid, "cannot load its data: KeyError: 'row'"),
        ('"largest": float', '"most": float', ConfigInvalid, "the facts of doubled:Doubled is not valid"),
        ('("batch", 2)', '("batch", 3)', StageFailed, r"a row is float32 of shape \(2\), said is"),
        ("return (outputs -", "return (outputs * float('nan') -", StageFailed, "not one finite number"),
        ('{"mae": error.new', '{"rmse": error.new', StageFailed, "does not give what the metrics need"),
    ],
)
def test_a_mistake_is_told_before_training(
    old: str, new: str, error: type[Exception], said: str, tmp_path: Path, doubled: Write
) -> None:
    assert old in HEAD + LOADS
    doubled((HEAD + LOADS).replace(old, new, 1))
    with pytest.raises(error, match=said):
        made(tmp_path)


def test_a_manifest_imports_nothing_that_no_run_names(
    tmp_path: Path, doubled: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{HEAD}{LOADS}")
    monkeypatch.setenv("HPML_IMPORT_PATHS", "")  # it could be imported, and is not
    for path in ("doubled:Doubled", "json:JSONDecoder", "antigravity:fly"):
        with pytest.raises(ConfigInvalid, match=f"no module for the task '{path}'.*HPML_IMPORT_PATHS"):
            task_of({"task": path, "largest": 1.5})
    assert not (tmp_path / "ran").exists() and "antigravity" not in sys.modules
    monkeypatch.setenv("HPML_IMPORT_PATHS", str(tmp_path))
    assert task_of({"task": "doubled:Doubled", "largest": 2.5}).task == "doubled:Doubled"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("rows", "test", "validation", "expected"),
    [
        (100, 0.2, 0.25, {"train": 60, "validation": 20, "test": 20}),
        (
            100,
            0.7,
            0.7,
            {"train": 9, "validation": 21, "test": 70},
        ),  # validation is of what is not for testing
        (3, 0.01, 0.01, {"train": 1, "validation": 1, "test": 1}),
        (4, 0.99, 0.01, None),  # three for testing: one row is not enough for two splits
        (4, 0.5, 0.99, {"train": 1, "validation": 1, "test": 2}),
    ],
)
def test_a_split_has_the_stated_share_and_none_is_empty(
    rows: int, test: float, validation: float, expected: dict[str, int] | None, tmp_path: Path
) -> None:
    fractions = {"test_fraction": test, "validation_fraction": validation}
    train = {"train": {"x": np.arange(rows)}}
    if expected is None:
        with pytest.raises(StageFailed, match="no rows are left for validation"):
            write_splits(train, Output(tmp_path, tmp_path), **fractions, seed=0)
        return
    splits = write_splits(train, Output(tmp_path, tmp_path), **fractions, seed=0)
    assert {name: split.rows for name, split in splits.items()} == expected
    parts = [np.load(tmp_path / f"{name}_x.npy") for name in splits]
    assert sorted(np.concatenate(parts)) == list(range(rows))


def test_a_fraction_of_a_split_that_the_data_has_is_told_to_be_of_no_use(
    tmp_path: Path, doubled: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(HEAD + LOADS.replace('"train": {', '"test": {"x": x, "y": 2 * x[:, 0]}, "train": {'))
    told: list[str] = []
    monkeypatch.setattr(Output, "note", lambda _, text: told.append(text))
    made(tmp_path, test_fraction=0.3, validation_fraction=0.3)
    assert told == ["test_fraction is not used: the data has a test split of its own"]


X = np.zeros((8, 2), "float32")
HOLED = np.where(np.arange(8)[:, None] == 5, np.nan, X)


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ({}, "the data are not splits: given: nothing"),
        ({"training": {"x": X}}, "given: training"),
        ({"train": {}}, "not a dict of 1 to 64 arrays"),
        ({"train": {"../x": X}}, "no name for an array"),
        ({"train": {"x": [[1.0]]}}, "is not an array with rows in front"),
        ({"train": {"x": np.array([object()])}}, "'x' of train holds object: allowed: bool"),
        ({"train": {"x": HOLED}}, "no finite number: in 1 row: 5"),
        ({"train": {"x": X, "y": X[:7]}}, "as many rows as each other: x 8, y 7"),
        (
            {"train": {"x": X}, "test": {"x": X[:, :1]}},
            r"in test there are x float32\[1\], in train x float32",
        ),
        ({"train": {"x": X}, "test": {"x": X.astype(int)}}, "in test there are x int64"),
        ({"train": {"x": X}, "test": {"x": X[:0]}}, "no rows are left for test"),
        ({"train": {"x": X[:2]}}, "no rows are left for validation: the data has train 2 -> give more rows"),
    ],
)
def test_arrays_that_are_no_dataset_are_refused(splits: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=said):
        write_splits(splits, Output(tmp_path, tmp_path), test_fraction=0.2, validation_fraction=0.2, seed=0)
