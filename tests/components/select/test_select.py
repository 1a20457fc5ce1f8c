"""select writes the chosen engine itself, or refuses and says what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.components.select import stage as select
from hpml.core.errors import ExitCode, GateFailed, StageFailed
from hpml.measuring.goals import DecisionRecord, Goals
from tests.image_tasks import image_task

TASK = image_task(classes=2)
LINEAGE = Lineage(
    stage="fixture",
    code_digest="",
    config=None,
    parents={},
    libraries={},
    started_at_s=0.0,
    seconds=0.0,
    peak_rss_bytes=0,
)


def engine(place: Path, content: bytes) -> Artifact[EngineSpec]:
    (place / "nested").mkdir(parents=True)
    (place / "model.onnx").write_bytes(content)
    (place / "nested" / "weights.data").write_bytes(content)
    spec = EngineSpec(
        target={"target": "onnx"},
        status="built",
        file="model.onnx",
        precision="fp32",
        methods=(),
        task=TASK.model_dump(mode="json"),
        operations=TASK.operations(),
        size_bytes=2 * len(content),
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE)
    return open_artifact(place, kind="engine")


def figures(size_bytes: int, p50: float, accuracy: float) -> EngineFigures:
    latency = Interval(value=p50, low=0.95 * p50, high=1.05 * p50)
    return EngineFigures(
        status="measured",
        target="onnx",
        precision="fp32",
        methods=(),
        size_bytes=size_bytes,
        parameters=10,
        macs=10,
        quality={"accuracy_top1": Interval(value=accuracy, low=accuracy, high=accuracy)},
        latency_ms_p50=latency,
        latency_ms_p90=latency,
        latency_ms_p99=latency,
        speedup_vs_reference=Interval(value=5 / p50, low=5 / p50, high=5 / p50),
    )


def measured(
    place: Path, engines: dict[str, Artifact[EngineSpec]], **of: EngineFigures
) -> Artifact[MeasurementsSpec]:
    place.mkdir()
    spec = MeasurementsSpec(
        reference="eager",
        best_fp32="eager",
        engines=of,
        rounds=1,
        threads=1,
        seed=0,
        environment={},
    )
    parents = {f"engines/{name}": artifact.digest for name, artifact in engines.items()}
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE.model_copy(update={"parents": parents}))
    return open_artifact(place, kind="measurements")


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Artifact[EngineSpec]]:
    return {name: engine(tmp_path / name, name.encode()) for name in ("eager", "fp32", "int8")}


@pytest.fixture
def measurements(tmp_path: Path, engines: dict[str, Artifact[EngineSpec]]) -> Artifact[MeasurementsSpec]:
    return measured(
        tmp_path / "measured",
        engines,
        eager=figures(40, 5.0, 0.97),
        fp32=figures(30, 2.0, 0.97),
        int8=figures(10, 1.0, 0.962),
    )


def test_the_output_is_the_chosen_engine_and_the_reasons(
    run_stage: Callable[..., Artifact[Any]],
    engines: dict[str, Artifact[EngineSpec]],
    measurements: Artifact[MeasurementsSpec],
) -> None:
    chosen = run_stage(select.run, Goals(), measured=measurements, engines=engines)
    assert chosen.spec == engines["int8"].spec
    assert set(chosen.manifest.files) == {*engines["int8"].manifest.files, "decision.json"}
    for name, entry in engines["int8"].manifest.files.items():
        assert chosen.manifest.files[name] == entry

    record = DecisionRecord.model_validate_json(chosen.file("decision.json").read_text())
    assert record.chosen == "int8" and record.engine_digest == engines["int8"].digest
    assert record.measurements_digest == measurements.digest
    assert record.goals == Goals()
    assert record.figures == measurements.spec.engines["int8"]
    assert record.reference_figures == measurements.spec.engines["eager"]
    assert record.verdicts["fp32"].outcome == "qualified"
    assert chosen.manifest.metrics == {
        "latency_ms_p50": 1.0,
        "latency_ms_p50_low": 0.95,
        "latency_ms_p50_high": 1.05,
        "size_bytes": 10.0,
        "qualified_engines": 2.0,
        "accuracy_top1": 0.962,
        "quality_loss": pytest.approx(0.008),
        "speedup_vs_reference": 5.0,
    }


def test_refuses_naming_the_nearest_and_what_it_misses(
    run_stage: Callable[..., Artifact[Any]],
    engines: dict[str, Artifact[EngineSpec]],
    measurements: Artifact[MeasurementsSpec],
    tmp_path: Path,
) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(GateFailed) as refused:
        run_stage(select.run, Goals(max_latency_ms_p99=0.8), measured=measurements, engines=engines)
    assert refused.value.exit_code == ExitCode.GATE_FAILED
    assert "the nearest is int8: latency p99 1.00 ms, allowed 0.80" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not [path for path in set(tmp_path.iterdir()) - before if not path.name.endswith(".scratch")]


def test_says_why_nothing_was_built(
    run_stage: Callable[..., Artifact[Any]], engines: dict[str, Artifact[EngineSpec]], tmp_path: Path
) -> None:
    absent = figures(0, 1.0, 0.9).model_copy(
        update={"status": "not built", "reason": "no GPU", "quality": {}}
    )
    spec = measured(tmp_path / "none", engines, eager=figures(40, 5.0, 0.97), int8=absent)
    with pytest.raises(GateFailed, match=r"no engine was built -> see why .*int8: no GPU"):
        run_stage(select.run, Goals(), measured=spec, engines=engines)


def test_refuses_figures_of_other_engines(
    run_stage: Callable[..., Artifact[Any]],
    engines: dict[str, Artifact[EngineSpec]],
    measurements: Artifact[MeasurementsSpec],
    tmp_path: Path,
) -> None:
    others = engines | {"int8": engine(tmp_path / "retrained", b"other weights")}
    with pytest.raises(StageFailed, match="figures of 'int8' were taken of another engine"):
        run_stage(select.run, Goals(), measured=measurements, engines=others)
    del others["int8"]
    with pytest.raises(StageFailed, match="'int8' was measured but is not given"):
        run_stage(select.run, Goals(), measured=measurements, engines=others)


def test_the_decision_is_plain_json(
    run_stage: Callable[..., Artifact[Any]],
    engines: dict[str, Artifact[EngineSpec]],
    measurements: Artifact[MeasurementsSpec],
) -> None:
    chosen = run_stage(select.run, Goals(), measured=measurements, engines=engines)
    fields = json.loads(chosen.file("decision.json").read_text())
    assert fields["verdicts"]["eager"] == {
        "outcome": "reference",
        "reason": "what the others are compared with, not a candidate",
        "shortfall": 0.0,
        "unverified": [],
    }


def test_chooses_with_what_is_known(
    run_stage: Callable[..., Artifact[Any]], engines: dict[str, Artifact[EngineSpec]], tmp_path: Path
) -> None:
    """No latency at all: the smallest, with only known metrics, and the goal that could not be checked."""
    busy = {"status": "not measured", "reason": "machine busy", "speedup_vs_reference": None}
    busy |= dict.fromkeys(("latency_ms_p50", "latency_ms_p90", "latency_ms_p99"))
    untimed = {
        name: figures(size_bytes, 1.0, 0.97).model_copy(update=busy)
        for name, size_bytes in (("eager", 40), ("fp32", 30), ("int8", 10))
    }
    spec = measured(tmp_path / "busy", engines, **untimed)
    chosen = run_stage(select.run, Goals(max_latency_ms_p99=1.0), measured=spec, engines=engines)
    record = DecisionRecord.model_validate_json(chosen.file("decision.json").read_text())
    assert (record.chosen, record.undecided) == ("int8", "latency is not measured")
    assert record.unverified == ("latency p99, allowed 1 ms, is not measured: machine busy",)
    assert chosen.manifest.metrics == {
        "size_bytes": 10.0,
        "qualified_engines": 2.0,
        "accuracy_top1": 0.97,
        "quality_loss": 0.0,
    }
