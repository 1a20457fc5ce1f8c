"""What `hpml bench` wrote can be computed again: the same samples make the same figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from hpml.artifacts.measurements import MeasurementsSpec
from hpml.core.errors import ConfigInvalid
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.rounds import Round, Rounds
from hpml.measuring.samples import read_samples, write_samples
from hpml.pipelines.bench.record import (
    RECORD,
    SAMPLES,
    BenchRecord,
    SubjectRecord,
    analysed,
    read_again,
)

REFERENCE = "small.onnx"
LAUNCHES = (4, 4, 3, 4, 5)
KNOWN: dict[str, JsonValue] = {
    "target": "onnx",
    "precision": "fp32",
    "methods": [],
    "size_bytes": 1,
    "parameters": 1,
    "macs": 1,
}

Samples = dict[str, np.ndarray]


@pytest.fixture
def samples() -> Samples:
    rng = np.random.default_rng(0)
    return {
        f"{name}@{batch}": slower * batch * rng.lognormal(0, 0.1, (20, 50 // batch))
        for name, slower in ((REFERENCE, 1.0), ("larger.onnx", 3.0))
        for batch in (1, 2, 8)
    }


@pytest.fixture
def folder(samples: Samples, tmp_path: Path) -> Path:
    """That of a bench with these samples, whose launches differ in length."""
    subject = SubjectRecord(kind="onnx", known=KNOWN, cold_start_ms=(20.0, 21.0), load_ms=(5.0, 6.0))
    record = BenchRecord(
        id="it",
        created_at="",
        command=(),
        config=BenchmarkConfig(reference=REFERENCE, batch_sizes=(2, 8), price_per_hour=0.4),
        libraries={},
        subjects={REFERENCE: subject, "larger.onnx": subject},
        measurements=MeasurementsSpec(
            reference=REFERENCE,
            best_fp32="",
            engines={},
            rounds=20,
            rounds_of_launches=LAUNCHES,
            threads=2,
            seed=0,
            environment={},
        ),
    )
    place = tmp_path / "bench"
    place.mkdir()
    np.savez(place / SAMPLES, allow_pickle=False, **samples)
    rounds = read_samples(place / SAMPLES, list(record.subjects), [1, 2, 8], LAUNCHES)
    (place / RECORD).write_text(analysed(record, rounds).model_dump_json())
    return place


def stored(folder: Path) -> BenchRecord:
    return BenchRecord.model_validate_json((folder / RECORD).read_bytes())


def test_the_samples_give_the_figures_that_stand_beside_them(folder: Path) -> None:
    record = stored(folder)
    for engine in record.measurements.engines.values():
        assert engine.latency_ms_p99 and engine.resources and engine.resources.price_per_million
        assert [item.batch for item in engine.throughput] == [2, 8]
    assert read_again(folder) == record
    without = record.measurements.model_copy(update={"engines": {}})
    (folder / RECORD).write_text(record.model_copy(update={"measurements": without}).model_dump_json())
    assert read_again(folder) == record


def test_figures_that_are_not_those_of_the_samples_are_seen(folder: Path, samples: Samples) -> None:
    samples["larger.onnx@1"] = samples["larger.onnx@1"] * 1.01
    np.savez(folder / SAMPLES, allow_pickle=False, **samples)
    said, found = (
        record.measurements.engines["larger.onnx"].latency_ms_p50
        for record in (stored(folder), read_again(folder))
    )
    assert said is not None and found is not None
    assert found.value == pytest.approx(1.01 * said.value)


def test_samples_that_are_missing_are_named(folder: Path, samples: Samples) -> None:
    del samples["larger.onnx@8"]
    np.savez(folder / SAMPLES, allow_pickle=False, **samples)
    with pytest.raises(ConfigInvalid, match=r"lacks samples of bench\.json: .*larger\.onnx@8"):
        read_again(folder)


def test_rounds_are_read_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    names, config = [REFERENCE, "larger.onnx"], stored(folder).config
    rng = np.random.default_rng(1)
    rounds = Rounds(
        Round(
            batch=batch,
            launch=index // 8,
            at_s=1000.0 + index,
            seconds=0.2,
            round_trip_ns=(190.0, 480.0 if index % 3 else 190.0),
            latency_ms={name: np.where(rng.random(6) < 0.1, np.nan, rng.random(6) + 1) for name in names},
        )
        for index in range(20)
        for batch in (1, 2, 8)
    )
    write_samples(tmp_path / "again.npz", rounds, names, config)
    found = read_samples(tmp_path / "again.npz", names, [1, 2, 8], ())
    assert len(found) == len(rounds)
    for batch in (1, 2, 8):
        for one, again in zip(rounds.at(batch), found.at(batch), strict=True):
            assert (one.launch, one.seconds, one.round_trip_ns) == (
                again.launch,
                again.seconds,
                again.round_trip_ns,
            )
            for name in names:
                np.testing.assert_array_equal(one.latency_ms[name], again.latency_ms[name])


def test_a_record_of_a_version_before_is_read(folder: Path) -> None:
    record = json.loads((folder / RECORD).read_text())
    retired = {"requests_per_round": 100, "images_per_round": 64, "scenario_backend": "loadgen"}
    record["config"] |= retired
    record["config"]["quiet"] |= {"enforce": False, "max_drift": 0.07}
    record["measurements"] |= {"requests_per_round": 100, "invalid": "the machine was busy"}
    del record["measurements"]["incomplete"]
    record["measurements"]["conditions"] |= {"enforced": True, "probe_spread": 0.1}
    (folder / RECORD).write_text(json.dumps(record))
    assert read_again(folder).measurements.incomplete == "the machine was busy"


@pytest.mark.parametrize(
    "worse",
    [lambda ms: -ms, lambda ms: ms * np.inf, lambda ms: ms * np.nan, lambda ms: ms.astype(np.float32)],
)
def test_what_is_no_latency_is_refused(folder: Path, samples: Samples, worse: Any) -> None:
    samples["larger.onnx@1"] = worse(samples["larger.onnx@1"])
    np.savez(folder / SAMPLES, allow_pickle=False, **samples)
    with pytest.raises(ConfigInvalid, match="are not latencies"):
        read_again(folder)
