"""The artifacts of a whole run, as its stages would have written them, with latencies drawn from a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import Conditions, EngineFigures, MeasurementsSpec, Throughput
from hpml.artifacts.metric import ACCURACY_TOP1
from hpml.artifacts.model import ArchitectureSpec, ModelSpec, QuantizationSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.core.contract import Config
from hpml.tasks.image_classification.task import ImageClassification

REFERENCE, BEST_FP32 = "fp32/eager", "fp32/onnx"
ROUNDS, REQUESTS = 20, 50


@dataclass(frozen=True)
class Variant:
    """What a made-up engine is like. latency_ms: its median at batch 1."""

    methods: tuple[str, ...]
    latency_ms: float
    accuracy_top1: float
    size_bytes: int
    reason: str = ""  # why it was not built
    target: str = "onnx"
    notes: tuple[str, ...] = ()


QUICKSTART = {
    "fp32/eager": Variant((), 2.31, 0.981, 2_820_000, target="eager"),
    "fp32/onnx": Variant((), 0.512, 0.981, 2_810_000),
    "int8/onnx": Variant(
        ("quantize",), 0.301, 0.979, 760_000, notes=("activations: uint8, measured 2.1x faster than int8",)
    ),
    "pruned+distilled/onnx": Variant(("prune", "distill"), 0.226, 0.974, 745_000),
    "pruned+distilled+int8/onnx": Variant(("prune", "distill", "quantize"), 0.171, 0.973, 226_000),
    "fp32/tensorrt": Variant(
        (), 0, 0, 0, reason="tensorrt is not installed and there is no GPU", target="tensorrt"
    ),
}


@dataclass(frozen=True)
class Run:
    """The inputs of the report, by the name of its parameters."""

    measured: Artifact[MeasurementsSpec]
    engines: dict[str, Artifact[EngineSpec]]
    models: dict[str, Artifact[ModelSpec]]
    data: Artifact[DatasetSpec]
    peaks: Artifact[PeaksSpec]
    diagnosis: Artifact[DiagnosisSpec]
    evaluation: Artifact[EvaluationSpec]

    @property
    def inputs(self) -> dict[str, Any]:
        """As keyword arguments."""
        return vars(self)


@dataclass
class _Writer:
    folder: Path
    clock_s: float = 1_760_000_000.0
    count: int = 0
    made: list[Path] = field(default_factory=list)

    def seal(self, stage: str, spec: Config, seconds: float, files: dict[str, Any]) -> Artifact[Any]:
        self.count += 1
        place = self.folder / f"artifact-{self.count}"
        place.mkdir()
        for name, content in files.items():
            if name.endswith(".npz"):
                np.savez(place / name, **content)
            else:
                (place / name).write_text(json.dumps(content))
        lineage = Lineage(
            stage=stage,
            code_digest="",
            config=None,
            parents={},
            libraries={},
            started_at_s=self.clock_s,
            seconds=seconds,
            peak_rss_bytes=int(4e8 + 2e6 * seconds),
        )
        self.clock_s += seconds
        seal_artifact(place, spec=spec, metrics={}, lineage=lineage)
        return open_artifact(place, kind=str(type(spec).model_fields["kind"].default))


def _curves(epochs: int, accuracy: float, start: float) -> list[dict[str, float]]:
    return [
        {
            "epoch": epoch,
            "loss": start * math.exp(-1.9 * epoch / epochs) + 0.02,
            "validation_accuracy_top1": accuracy - 0.4 * math.exp(-4 * epoch / epochs) * start / 2.3,
        }
        for epoch in range(1, epochs + 1)
    ]


def _latencies(variant: Variant, speed: np.ndarray, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Milliseconds by batch size: lognormal around the median, with a tail, and what slowed a whole round."""
    tail = np.where(rng.random((ROUNDS, REQUESTS)) < 0.03, rng.uniform(1.2, 2.0, (ROUNDS, REQUESTS)), 1.0)
    noise = np.exp(rng.normal(0, 0.05, (ROUNDS, REQUESTS)))
    one = variant.latency_ms * speed * noise * tail
    return {batch: one[:, :16] * batch**0.8 for batch in (8, 32)} | {1: one}


@pytest.fixture
def variants() -> dict[str, Variant]:
    """The engines of the quickstart, and one that was not built."""
    return QUICKSTART


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """make_run(variants, class_names=...): the artifacts of a run of these variants."""

    def make(
        variants: dict[str, Variant] = QUICKSTART,
        *,
        class_names: tuple[str, ...] = tuple("0123456789"),
        environment: dict[str, str] | None = None,
    ) -> Run:
        writer = _Writer(tmp_path)
        task = ImageClassification(
            class_names=class_names, image_shape_hwc=(32, 32, 1), mean=(0.13,), std=(0.31,)
        )
        data_spec = DatasetSpec(
            task=task.model_dump(mode="json"),
            splits={
                "train": SplitSpec(rows=4000, class_counts=(400,) * 10),
                "validation": SplitSpec(rows=1000, class_counts=(100,) * 10),
                "test": SplitSpec(rows=500, class_counts=(50,) * 10),
            },
            source="mnist5k",
            licence="BSD-3-Clause",
        )
        data = writer.seal("prepare", data_spec, 1.4, {})
        models = {"base": _model(writer, task, (), 0.981, 84.0, _curves(8, 0.981, 2.3))}
        engines = {}
        for name, variant in variants.items():
            own = name.rpartition("/")[0]
            if not variant.methods:
                models.setdefault(own, models["base"])
            elif own not in models:
                history = [] if variant.methods[-1] == "quantize" else _curves(4, variant.accuracy_top1, 0.6)
                seconds = 41.0 if history else 2.2
                models[own] = _model(writer, task, variant.methods, variant.accuracy_top1, seconds, history)
            engines[name] = _engine(writer, variant, task)
        measured = _measure(writer, variants, engines, environment)
        peaks = writer.seal("peaks", PeaksSpec(hardware={}, bandwidths=(), gemms=()), 14.2, {})
        diagnosis = writer.seal("diagnose", _diagnosis(variants), 6.3, {})
        evaluation = writer.seal("evaluate", _evaluation(variants), 0.9, {})
        return Run(measured, engines, models, data, peaks, diagnosis, evaluation)

    return make


def _diagnosis(variants: dict[str, Variant]) -> DiagnosisSpec:
    return DiagnosisSpec(
        threads=2,
        engines={
            name: EngineDiagnosis(
                status="not diagnosed" if variant.reason else "diagnosed",
                reason=variant.reason,
                time_us=1e3 * variant.latency_ms,
                verdict="" if variant.reason else "the machine has no peaks to compare with",
            )
            for name, variant in variants.items()
        },
    )


def _evaluation(variants: dict[str, Variant]) -> EvaluationSpec:
    """The last variant that was built, half a point worse on the test split."""
    chosen = [name for name, variant in variants.items() if not variant.reason][-1]
    own, reference = (variants[name].accuracy_top1 - 0.005 for name in (chosen, REFERENCE))
    return EvaluationSpec(
        test_split="once",
        engine=chosen,
        reference=REFERENCE,
        rows=500,
        metrics=(ACCURACY_TOP1,),
        quality={"accuracy_top1": _around(own, 0.005)},
        reference_quality={"accuracy_top1": _around(reference, 0.005)},
    )


def _model(
    writer: _Writer,
    task: ImageClassification,
    methods: tuple[str, ...],
    accuracy: float,
    seconds: float,
    history: list[dict[str, float]],
) -> Artifact[ModelSpec]:
    quantization = QuantizationSpec(
        scheme="static",
        weights="int8-per-channel",
        activations="auto",
        calibration="minmax",
        calibration_rows=(1, 2),
    )
    spec = ModelSpec(
        architecture=ArchitectureSpec(name="resnet18", arguments={"width": 16}),
        task=task.model_dump(mode="json"),
        operations=task.operations(),
        methods=methods,
        quantization=quantization if "quantize" in methods else None,
        parameters=698_714,
        macs=34_900_000,
        quality={"accuracy_top1": accuracy},
    )
    return writer.seal("compress" if methods else "train", spec, seconds, {"history.json": history})


def _engine(writer: _Writer, variant: Variant, task: ImageClassification) -> Artifact[EngineSpec]:
    runtime = "torch 2.13.0+cpu" if variant.target == "eager" else f"{variant.target} 1.31.0"
    spec = EngineSpec(
        target={"target": variant.target},
        status="not built" if variant.reason else "built",
        reason=variant.reason,
        file="model.onnx",
        precision="int8" if "quantize" in variant.methods else "fp32",
        methods=variant.methods,
        task=task.model_dump(mode="json"),
        operations=task.operations(),
        identity={"runtime": runtime, "device": "cpu"},
        notes=variant.notes,
        size_bytes=variant.size_bytes,
        parameters=698_714,
        macs=34_900_000,
        quality={"accuracy_top1": variant.accuracy_top1},
        max_abs_error=2.1e-5,
        agreement=0.998,
    )
    return writer.seal("export", spec, 3.1, {})


def _measure(
    writer: _Writer,
    variants: dict[str, Variant],
    engines: dict[str, Artifact[EngineSpec]],
    environment: dict[str, str] | None,
) -> Artifact[MeasurementsSpec]:
    rng = np.random.default_rng(7)
    speed = np.exp(rng.normal(0, 0.02, (ROUNDS, 1)))
    latencies = {name: _latencies(v, speed, rng) for name, v in variants.items() if not v.reason}
    spec = MeasurementsSpec(
        reference=REFERENCE,
        best_fp32=BEST_FP32 if BEST_FP32 in variants else "",
        engines={
            name: _figures(engines[name].spec, variant, latencies.get(name), latencies)
            for name, variant in variants.items()
        },
        rounds=ROUNDS,
        slice_ms=25.0,
        threads=2,
        seed=0,
        environment=environment
        or {"cpu": "Intel Xeon Processor cpu family 6 model 106", "cpu_flags": "avx2 avx512f avx512_vnni"},
        harness_us_per_request=0.31,
        conditions=Conditions(cpu_pressure=0.021),
    )
    samples = {f"{name}@{batch}": array for name, of in latencies.items() for batch, array in of.items()}
    return writer.seal("benchmark", spec, 21.7, {"samples.npz": samples})


def _figures(
    engine: EngineSpec,
    variant: Variant,
    latencies: dict[int, np.ndarray] | None,
    of_all: dict[str, dict[int, np.ndarray]],
) -> EngineFigures:
    """Percentiles of the samples, with intervals of a made-up width."""
    known: dict[str, Any] = {
        "target": variant.target,
        "precision": engine.precision,
        "methods": engine.methods,
        "size_bytes": engine.size_bytes,
        "parameters": engine.parameters,
        "macs": engine.macs,
    }
    if latencies is None:
        return EngineFigures(status="not built", reason=variant.reason, **known)
    p50 = float(np.median(latencies[1]))
    percentiles = {
        f"latency_ms_p{percent}": _around(float(np.percentile(latencies[1], percent)))
        for percent in (50, 90, 99)
    }
    speeds = {
        f"speedup_vs_{which}": _around(float(np.median(of_all[name][1])) / p50)
        for which, name in (("reference", REFERENCE), ("best_fp32", BEST_FP32))
        if name in of_all
    }
    rounds = np.median(latencies[1], axis=1)
    return EngineFigures(
        status="measured",
        **known,
        **percentiles,
        **speeds,
        quality={"accuracy_top1": _around(variant.accuracy_top1, 0.005)},
        throughput=tuple(
            Throughput(batch=batch, rows_per_s=_around(1e3 * batch / float(np.median(of_batch))))
            for batch, of_batch in sorted(latencies.items())
        ),
        samples=latencies[1].size,
        round_spread=float((rounds.max() - rounds.min()) / p50),
    )


def _around(value: float, share: float = 0.01) -> Interval:
    return Interval(value=value, low=value / (1 + share), high=value * (1 + share))
