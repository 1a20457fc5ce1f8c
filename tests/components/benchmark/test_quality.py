"""Paired quality: known values of the literature, exact coverage, and real engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, copy_files, open_artifact, seal_artifact
from hpml.artifacts.measurements import PairedQuality
from hpml.core.errors import StageFailed
from hpml.measuring.quality import (
    judged_engines,
    mcnemar_exact,
    paired_change,
    paired_quality,
)
from hpml.tasks.judging import JUDGED
from tests.image_tasks import judgement_of_logits

Engines = dict[str, Artifact[EngineSpec]]
REFERENCE = "fp32/eager"
Z = 1.959964


# ----------------------------------------------------------------------------------------------- known values


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (1, 7, 0.0703),  # airway hyper-responsiveness, Fagerland et al. 2013, BMC Med. Res. Methodol. 13:91
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 5, 0.0625),
        (10, 0, 2 / 1024),
        (1500, 1700, 0.000434),  # the normal approximation with continuity correction: 0.00044
    ],
)
def test_mcnemar(gained: int, lost: int, p: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p, rel=0.01)
    assert mcnemar_exact(lost, gained) == mcnemar_exact(gained, lost)


@pytest.mark.parametrize(
    ("gained", "lost", "rows", "low", "high"),
    [
        (1, 7, 21, -0.517, -0.026),  # Fagerland et al. 2014, Statist. Med. 33:2850-2875, Tango's interval
        (0, 0, 1000, -(Z**2) / (1000 + Z**2), Z**2 / (1000 + Z**2)),  # Tango 1998: where no pair disagrees
        (0, 21, 21, -1.0, -(21 - Z**2) / (21 + Z**2)),
    ],
)
def test_the_interval_of_a_change(gained: int, lost: int, rows: int, low: float, high: float) -> None:
    found = paired_change(gained, lost, rows)
    assert found.value == (gained - lost) / rows
    assert [found.low, found.high] == pytest.approx([low, high], abs=6e-4)


counts = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 2000))


@given(counts)
def test_an_interval_holds_its_value_and_turns_over(given: tuple[int, int, int]) -> None:
    gained, lost, agreeing = given
    rows = gained + lost + agreeing
    found, turned = paired_change(gained, lost, rows), paired_change(lost, gained, rows)
    assert -1 <= found.low < found.value < found.high <= 1
    assert [turned.low, turned.high] == pytest.approx([-found.high, -found.low], abs=1e-12)


@given(counts)
def test_the_ends_are_the_changes_that_a_score_test_just_refuses(given: tuple[int, int, int]) -> None:
    gained, lost, agreeing = given
    rows = gained + lost + agreeing
    found = paired_change(gained, lost, rows)
    for end, z in ((found.low, Z), (found.high, -Z)):
        assert _score_by_search(gained, lost, rows, end) == pytest.approx(z, abs=2e-3)


def _score_by_search(gained: int, lost: int, rows: int, change: float) -> float:
    """The score of `change`, the shares under it found by maximizing the likelihood on a fine grid."""
    least, most = max(0.0, -change), (1 - change) / 2  # of the share of `lost`
    for _ in range(60):
        grid = np.linspace(least, most, 9)[1:-1]
        likelihood = (rows - gained - lost) * np.log1p(-2 * grid - change)
        likelihood += gained * np.log(grid + change) if gained else 0
        likelihood += lost * np.log(grid) if lost else 0
        best = grid[likelihood.argmax()]
        step = (most - least) / 8
        least, most = max(least, best - step), min(most, best + step)
    share = (least + most) / 2
    variance = rows * (2 * share + change - change**2)
    return float((gained - lost - rows * change) / math.sqrt(variance))


@pytest.mark.parametrize(
    ("rows", "gains", "loses"),
    [(1000, 0.004, 0.01), (1000, 0.01, 0.03), (360, 0.01, 0.03), (1000, 0.0, 0.01), (1000, 0.002, 0.002)],
)
def test_the_interval_holds_the_truth(rows: int, gains: float, loses: float) -> None:
    """Exactly: over all outcomes, by their probability."""
    held, all_seen = 0.0, 0.0
    for gained in range(int(rows * gains * 3) + 8):
        for lost in range(int(rows * loses * 3) + 8):
            chance = _chance(gained, lost, rows, gains, loses)
            all_seen += chance
            if chance > 1e-6:
                found = paired_change(gained, lost, rows)
                held += chance * (found.low <= gains - loses <= found.high)
    assert all_seen > 0.999
    assert 0.94 <= held <= 0.98


def _chance(gained: int, lost: int, rows: int, gains: float, loses: float) -> float:
    """Of this outcome, by the multinomial."""
    rest = rows - gained - lost
    logarithm = math.lgamma(rows + 1) + rest * math.log1p(-gains - loses) - math.lgamma(rest + 1)
    for count, share in ((gained, gains), (lost, loses)):
        if not share:
            if count:
                return 0.0
            continue
        logarithm += count * math.log(share) - math.lgamma(count + 1)
    return math.exp(logarithm)


# ------------------------------------------------------------------------------------------------- of engines


def _paired(engine: np.ndarray, reference: np.ndarray, labels: np.ndarray) -> PairedQuality:
    return paired_quality(judgement_of_logits(engine, labels), judgement_of_logits(reference, labels), labels)


def test_what_two_engines_say_of_five_samples() -> None:
    labels = np.array([0, 1, 1, 2, 2])
    reference = np.eye(3, dtype=np.float32)[[0, 1, 0, 2, 0]]  # right, right, wrong, right, wrong
    engine = np.eye(3, dtype=np.float32)[[0, 2, 1, 2, 1]]  # right, lost, gained, right, wrong otherwise
    engine[0, 1] = -0.25
    found = _paired(engine, reference, labels)
    assert (found.gained, found.lost, found.mcnemar_p) == (1, 1, 1)
    assert found.change == {"accuracy_top1": paired_change(1, 1, 5)}
    assert [round(one.value, 3) for one in found.groups] == [1.0, 0.5, 0.5]
    assert found.agreement == pytest.approx(2 / 5)
    assert found.max_abs_error == 1.0


def test_a_class_without_samples_may_be_anything() -> None:
    logits = np.eye(3, dtype=np.float32)[[0, 1]]
    found = _paired(logits, logits, np.array([0, 1]))
    assert (found.groups[2].low, found.groups[2].high) == (0, 1)


def test_real_engines_are_paired_with_the_reference(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec]
) -> None:
    judged = judged_engines(digits_engines, digits_data)
    labels = np.load(digits_data.file("validation_labels.npy"))
    exact, quantized = (
        paired_quality(judged[name], judged[REFERENCE], labels) for name in ("fp32/onnx", "int8/onnx")
    )
    assert (exact.gained, exact.lost, exact.agreement) == (0, 0, 1.0)
    assert exact.max_abs_error is not None and quantized.max_abs_error is not None
    assert 0 < exact.max_abs_error < 1e-3 < quantized.max_abs_error
    assert quantized.agreement is not None and 0.9 < quantized.agreement <= 1
    rows = digits_data.spec.splits["validation"].class_counts
    right = sum(one.value * count for one, count in zip(quantized.groups, rows, strict=True))
    of_engine = digits_engines["int8/onnx"].spec.quality
    assert of_engine == {"accuracy_top1": pytest.approx(right / sum(rows))}


def test_an_engine_that_was_not_built_is_left_out(
    digits_engines: Engines, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    lineage = digits_engines["fp32/onnx"].manifest.lineage
    spec = digits_engines["fp32/onnx"].spec.model_copy(update={"status": "not built", "reason": "no GPU"})
    (tmp_path / "not-built").mkdir()
    seal_artifact(tmp_path / "not-built", spec=spec, metrics={}, lineage=lineage)
    engines = {**digits_engines, "fp32/tensorrt": open_artifact(tmp_path / "not-built", kind="engine")}
    assert "fp32/tensorrt" not in judged_engines(engines, digits_data)


@pytest.mark.parametrize(
    ("logits", "problem"),
    [
        (np.zeros((359, 10), np.float32), "logits is (359, 10)"),
        (np.full((360, 10), np.nan, np.float32), "3600 numbers of logits are not finite"),
        (b"no array", "does not hold arrays"),
        (None, "a version before there were tasks exported them -> export them again from the same model"),
    ],
)
def test_logits_of_something_else_are_refused(
    digits_engines: Engines,
    digits_data: Artifact[DatasetSpec],
    tmp_path: Path,
    logits: np.ndarray | bytes | None,
    problem: str,
) -> None:
    place = tmp_path / "engine"
    place.mkdir()
    copy_files(digits_engines["int8/onnx"], place)
    (place / JUDGED).unlink()
    if isinstance(logits, bytes):
        (place / JUDGED).write_bytes(logits)
    elif logits is not None:
        judgement_of_logits(logits, np.zeros(len(logits), np.int64)).save(place)
    lineage = digits_engines["int8/onnx"].manifest.lineage
    seal_artifact(place, spec=digits_engines["int8/onnx"].spec, metrics={}, lineage=lineage)
    engines = {**digits_engines, "int8/onnx": open_artifact(place, kind="engine")}
    with pytest.raises(StageFailed, match="'int8/onnx'") as failed:
        judged_engines(engines, digits_data)
    assert problem in str(failed.value)
