"""What is published can be computed again: the same samples make the same figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.artifacts import Artifact, DatasetSpec, EngineSpec, open_artifact, seal_artifact
from components.benchmark.accuracy import paired_accuracies
from components.benchmark.figures import best_fp32, figures
from components.benchmark.reanalyse import reanalyse
from components.errors import StageFailed
from components.measurements import MeasurementsSpec

Engines = dict[str, Artifact[EngineSpec]]
REFERENCE = "fp32/eager"
LAUNCHES = (4, 4, 3, 4, 5)


def _latencies(names: list[str]) -> dict[str, dict[int, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: {batch: batch * rng.lognormal(0, 0.1, (20, 50 // batch)) for batch in (1, 2, 8)}
        for name in names
    }


@pytest.fixture
def measured(digits_engines: Engines, digits_data: Artifact[DatasetSpec], tmp_path: Path) -> Artifact[Any]:
    """Measurements as the benchmark writes them, one engine not built."""
    latencies = _latencies([REFERENCE, "fp32/onnx"])
    fastest = best_fp32(digits_engines, latencies, reference=REFERENCE)
    spec = MeasurementsSpec(
        reference=REFERENCE,
        best_fp32=fastest,
        engines=figures(
            digits_engines,
            latencies,
            data=digits_data.spec,
            paired=paired_accuracies(digits_engines, digits_data, reference=REFERENCE),
            batch_sizes=(2, 8),
            reference=REFERENCE,
            fastest_fp32=fastest,
            launches=LAUNCHES,
        ),
        rounds=20,
        rounds_of_launches=LAUNCHES,
        requests_per_round=50,
        threads=2,
        seed=0,
        environment={},
    )
    samples = {f"{name}@{batch}": array for name, of in latencies.items() for batch, array in of.items()}
    return _sealed(tmp_path / "measured", spec, digits_engines, samples)


def _sealed(place: Path, spec: MeasurementsSpec, engines: Engines, samples: dict[str, np.ndarray]) -> Any:
    place.mkdir()
    np.savez(place / "samples.npz", allow_pickle=False, **samples)
    seal_artifact(place, spec=spec, metrics={}, lineage=engines[REFERENCE].manifest.lineage)
    return open_artifact(place, kind="measurements")


def test_the_published_samples_give_the_published_figures(measured: Artifact[MeasurementsSpec]) -> None:
    assert measured.spec.engines["int8/onnx"].status == "not built"
    assert measured.spec.engines["fp32/onnx"].paired is not None
    assert reanalyse(measured) == measured.spec


def test_figures_that_are_not_those_of_the_samples_are_seen(
    measured: Artifact[MeasurementsSpec], digits_engines: Engines, tmp_path: Path
) -> None:
    with np.load(measured.file("samples.npz"), allow_pickle=False) as archive:
        samples = dict(archive)
    samples["fp32/onnx@1"] = samples["fp32/onnx@1"] * 1.01
    again = reanalyse(_sealed(tmp_path / "changed", measured.spec, digits_engines, samples))
    said, found = (spec.engines["fp32/onnx"].latency_ms_p50 for spec in (measured.spec, again))
    assert said is not None and found is not None
    assert found.value == pytest.approx(1.01 * said.value)


def test_samples_that_are_missing_are_named(
    measured: Artifact[MeasurementsSpec], digits_engines: Engines, tmp_path: Path
) -> None:
    lacking = _sealed(
        tmp_path / "lacking", measured.spec, digits_engines, {f"{REFERENCE}@1": np.ones((5, 3))}
    )
    with pytest.raises(StageFailed, match="samples of every measured engine"):
        reanalyse(lacking)


def test_a_refused_measurement_has_no_figures_to_compute(
    measured: Artifact[MeasurementsSpec], digits_engines: Engines, tmp_path: Path
) -> None:
    spec = measured.spec.model_copy(update={"engines": {}, "invalid": "the machine was busy"})
    refused = _sealed(tmp_path / "refused", spec, digits_engines, {})
    assert reanalyse(refused) == spec
