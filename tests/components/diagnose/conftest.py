"""Real engines with one trait each, built node by node, and peaks to compare them with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, EngineSettings, MeasurementsSpec, Throughput
from hpml.artifacts.model import QuantizationSpec
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec
from hpml.components.diagnose import stage as diagnose
from hpml.core.contract import validate
from hpml.targets import AnyTarget
from hpml.targets.onnx_graph import save_graph, to_int8
from hpml.targets.tensorrt import GRAPH, without_weights
from hpml.tasks.image_classification.task import ImageClassification
from tests.conftest import LINEAGE
from tests.image_tasks import image_task

THREADS = 2
INT8_GAIN = 4.0  # of the int8 GEMM over the fp32 one, in these peaks
LEVELS = {"L1": 32_000, "L2": 1_000_000, "L3": 16_000_000, "DRAM": 256_000_000}

SPLITS = ("train", "validation", "test")

Shape = tuple[int, int, int]
Engines = Mapping[str, Artifact[EngineSpec]]


def interval(value: float) -> Interval:
    return Interval(value=value, low=0.97 * value, high=1.03 * value)


def make_peaks(
    *,
    gflop_per_s: float = 100.0,
    gb_per_s: float = 50.0,
    int8_gain: float = INT8_GAIN,
    threads: int = THREADS,
) -> PeaksSpec:
    """Of a machine with the same bandwidth in all levels of its memory."""
    bandwidths = tuple(
        BandwidthPoint(
            device="cpu",
            kernel="copy",
            threads=threads,
            working_set_bytes=size,
            level=level,
            gb_per_s=interval(gb_per_s),
        )
        for level, size in LEVELS.items()
    )
    gemms = tuple(
        GemmPoint(
            device="cpu",
            precision=precision,
            library="torch (oneDNN)",
            threads=threads,
            size=1024,
            gflop_per_s=interval(rate),
        )
        for precision, rate in (("fp32", gflop_per_s), ("int8", int8_gain * gflop_per_s))
    )
    return PeaksSpec(hardware={}, bandwidths=bandwidths, gemms=gemms)


def make_gpu_peaks(*, gflop_per_s: float = 50_000.0, gb_per_s: float = 2_000.0) -> PeaksSpec:
    """Of a machine with a GPU: fp16 is 2 times as fast there as fp32, int8 is 4 times."""
    cpu = make_peaks()
    on_gpu = {"device": "cuda", "threads": 1}
    memory = cpu.bandwidths[-1].model_copy(
        update={**on_gpu, "level": "device", "gb_per_s": interval(gb_per_s)}
    )
    gemms = tuple(
        cpu.gemms[0].model_copy(
            update={**on_gpu, "precision": precision, "gflop_per_s": interval(gain * gflop_per_s)}
        )
        for precision, gain in (("fp32", 1), ("fp16", 2), ("int8", 4))
    )
    return cpu.model_copy(update={"bandwidths": (*cpu.bandwidths, memory), "gemms": cpu.gemms + gemms})


def noise_task(shape_chw: Shape) -> ImageClassification:
    """Of images of two classes."""
    return image_task(shape_chw, classes=2, mean=0.5, std=0.25)


def shape_of(engine: Artifact[EngineSpec]) -> Shape:
    """(channels, height, width) of the images that an engine takes."""
    height, width, channels = ImageClassification.model_validate(engine.spec.task).image_shape_hwc
    return channels, height, width


def request_of(engine: Artifact[EngineSpec]) -> dict[str, np.ndarray]:
    """One black image."""
    return {"x_nchw": np.zeros((1, *shape_of(engine)), np.float32)}


def sealed(place: Path, spec: Any, kind: str) -> Any:
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE)
    return open_artifact(place, kind=kind)


# ------------------------------------------------------------------------------------------------ networks


class Network:
    """A graph of `x_nchw`, written down node by node, with random weights."""

    def __init__(self, shape_chw: Shape) -> None:
        self.shape_chw = shape_chw
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self._channels, self._at = shape_chw[0], "x_nchw"
        self._rng = np.random.default_rng(0)

    def conv(self, channels: int, kernel: int = 3, *, stride: int = 1, relu: bool = True) -> Network:
        name = f"conv{len(self.nodes)}"
        shape = (channels, self._channels, kernel, kernel)
        self.constants[f"{name}.weight"] = self._random(shape)
        pad = kernel // 2
        self._add(
            "Conv", name, f"{name}.weight", pads=[pad] * 4, strides=[stride] * 2, kernel_shape=[kernel] * 2
        )
        self._channels = channels
        return self.then("Relu") if relu else self

    def then(self, op: str) -> Network:
        self._add(op, f"{op.lower()}{len(self.nodes)}")
        return self

    def plus(self, value: float) -> Network:
        name = f"add{len(self.nodes)}"
        self.constants[f"{name}.addend"] = np.full((self._channels, 1, 1), value, np.float32)
        self._add("Add", name, f"{name}.addend")
        return self

    def residual(self) -> Network:
        """Two convolutions with a skip around the second."""
        before = self.conv(self._channels)._at
        after = self.conv(self._channels, relu=False)._at
        name = f"sum{len(self.nodes)}"
        self.nodes.append(helper.make_node("Add", [after, before], [name], name=name))
        self._at = name
        return self.then("Relu")

    def head(self, classes: int = 2) -> Network:
        """Mean over the image, and a linear layer."""
        self._add("GlobalAveragePool", "pool")
        self._add("Flatten", "flat")
        return self.linear(classes, name="head")

    def linear(self, features: int, *, inputs: int = 0, name: str = "") -> Network:
        name = name or f"linear{len(self.nodes)}"
        self.constants[f"{name}.weight"] = self._random((features, inputs or self._channels))
        self._add("Gemm", name, f"{name}.weight", transB=1)
        self._channels = features
        return self

    def _random(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))

    def _add(self, op: str, name: str, *constants: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, [self._at, *constants], [name], name=name, **attributes))
        self._at = name

    def write(self, file: Path) -> None:
        self.nodes[-1].output[0] = "logits"
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("x_nchw", TensorProto.FLOAT, ["batch", *self.shape_chw])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", None])],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        if self.nodes[-1].op_type != "Gemm":
            del graph.output[0].type.tensor_type.shape.dim[:]
            graph.output[0].type.tensor_type.ClearField("shape")
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)


MakeEngine = Callable[..., Artifact[EngineSpec]]


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    """An engine of a Network in fp32, or in int8 with `activations` "uint8" or "int8".

    One for TensorRT has the graph that its plan would be compiled from, and no plan.
    """

    def make(
        network: Network,
        *,
        activations: Any = "",
        in_fp32: Sequence[str] = (),
        methods: tuple[str, ...] | None = None,
        macs: int = 0,
        identity: Mapping[str, str] | None = None,
        target: str = "onnx",
        with_graph: bool = True,
        precision: str = "",
        missing: str = "",
    ) -> Artifact[EngineSpec]:
        place = tmp_path_factory.mktemp("engine")
        task = noise_task(network.shape_chw)
        network.write(place / "model.onnx")
        for_tensorrt = target == "tensorrt"
        if activations:
            _quantize(place / "model.onnx", network.shape_chw, activations, list(in_fp32), for_tensorrt)
        if for_tensorrt and with_graph:
            save_graph(without_weights(onnx.load(place / "model.onnx")), place / GRAPH)
        spec = EngineSpec(
            target={"target": target},
            status="not built" if missing else "built",
            reason=missing,
            file="model.onnx",
            precision=precision or ("int8" if activations else "fp32"),
            methods=(("quantize",) if activations else ()) if methods is None else methods,
            task=task.model_dump(mode="json"),
            operations=task.operations(),
            identity={"device": "cpu", "weight_bits": "7", **(identity or {})},
            macs=macs,
        )
        artifact: Artifact[EngineSpec] = sealed(place, spec, "engine")
        return artifact

    return make


def _quantize(file: Path, shape_chw: Shape, activations: Any, in_fp32: list[str], for_tensorrt: bool) -> None:
    spec = QuantizationSpec(
        scheme="static",
        weights="int8-per-channel",
        activations=activations,
        calibration="minmax",
        calibration_rows=(0,),
    )
    x_nchw = np.random.default_rng(0).standard_normal((8, *shape_chw), np.float32)
    to_int8(
        file,
        file,
        spec,
        {"x_nchw": x_nchw},
        activations=activations,
        excluded_nodes=in_fp32,
        reduce_range=not for_tensorrt,
        for_tensorrt=for_tensorrt,
    )


# ----------------------------------------------------------------------------------------------- diagnosing


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Artifact[DatasetSpec]]:
    """Noise of a shape (channels, height, width)."""

    def make(shape_chw: Shape) -> Artifact[DatasetSpec]:
        channels, height, width = shape_chw
        place = tmp_path_factory.mktemp("images")
        rng = np.random.default_rng(0)
        for split in SPLITS:
            shape = (8, height, width, channels)
            np.save(place / f"{split}_images.npy", rng.integers(0, 255, shape, dtype=np.uint8))
            np.save(place / f"{split}_labels.npy", np.arange(8) % 2)
        spec = DatasetSpec(
            task=noise_task(shape_chw).model_dump(mode="json"),
            splits={name: SplitSpec(rows=8, class_counts=(4, 4)) for name in SPLITS},
            source="noise",
            licence="none",
        )
        artifact: Artifact[DatasetSpec] = sealed(place, spec, "dataset")
        return artifact

    return make


Diagnose = Callable[..., DiagnosisSpec]


@pytest.fixture
def run_diagnosis(run_stage: Any, images: Any, tmp_path: Path) -> Diagnose:
    """Time engines in turns, and diagnose them with the stage: run_diagnosis({"fp32/onnx": engine}).

    time_us and throughput (by batch) stand in for what is measured otherwise.
    """
    counter = itertools.count()

    def run(
        engines: Engines,
        *,
        peaks: PeaksSpec | None = None,
        threads: int = THREADS,
        time_us: Mapping[str, float] | None = None,
        throughput: Mapping[str, Mapping[int, float]] | None = None,
        not_measured: Mapping[str, str] | None = None,
        settings: Mapping[str, EngineSettings] | None = None,
        data: Artifact[DatasetSpec] | None = None,
        **config: Any,
    ) -> DiagnosisSpec:
        built = {name: engine for name, engine in engines.items() if engine.spec.status == "built"}
        runs_here = {name: one for name, one in built.items() if one.spec.identity["device"] == "cpu"}
        times_us = {**_times_us(runs_here, threads), **(time_us or {})}
        measured = make_measured(
            engines, times_us, throughput or {}, threads=threads, not_measured=not_measured or {}
        )
        for name, of_engine in (settings or {}).items():
            measured.engines[name] = measured.engines[name].model_copy(update={"settings": of_engine})
        folders = [tmp_path / f"{kind}-{next(counter)}" for kind in ("measured", "peaks")]
        for folder in folders:
            folder.mkdir()
        spec: DiagnosisSpec = run_stage(
            diagnose.run,
            diagnose.DiagnoseConfig(**{"seconds": 0.2, **config}),
            engines=dict(engines),
            measured=sealed(folders[0], measured, "measurements"),
            peaks=sealed(folders[1], peaks or make_peaks(threads=threads), "peaks"),
            data=data or images(shape_of(next(iter(engines.values())))),
        ).spec
        return spec

    return run


def make_measured(
    engines: Engines,
    times_us: Mapping[str, float],
    throughput: Mapping[str, Mapping[int, float]],
    *,
    threads: int = THREADS,
    not_measured: Mapping[str, str] = MappingProxyType({}),
) -> MeasurementsSpec:
    """A benchmark with these figures; an engine without a time was not built. not_measured: why."""
    return MeasurementsSpec(
        reference=next(iter(engines)),
        best_fp32="",
        engines={
            name: _figures(
                engine.spec, times_us.get(name), throughput.get(name, {}), not_measured.get(name, "")
            )
            for name, engine in engines.items()
        },
        rounds=1,
        threads=threads,
        seed=0,
        environment={},
        incomplete="; ".join(not_measured.values()),
    )


def _figures(
    spec: EngineSpec, time_us: float | None, throughput: Mapping[int, float], not_measured: str
) -> EngineFigures:
    if not_measured:
        time_us, throughput = None, {}
    return EngineFigures(
        status="not measured" if not_measured else "measured" if time_us else "not built",
        reason=not_measured,
        target=str(spec.target["target"]),
        precision=spec.precision,
        methods=spec.methods,
        size_bytes=0,
        parameters=0,
        macs=spec.macs,
        latency_ms_p50=interval(time_us / 1e3) if time_us else None,
        throughput=tuple(
            Throughput(batch=batch, rows_per_s=interval(rate)) for batch, rate in throughput.items()
        ),
    )


def _times_us(engines: Engines, threads: int) -> dict[str, float]:
    """The fastest request to each, in turns: what a busy machine disturbs least."""
    sessions = {}
    for name, engine in engines.items():
        target: AnyTarget = validate(AnyTarget, engine.spec.target, where="a test")
        sessions[name] = target.load(engine.path, engine.spec, threads=threads)
    durations_us: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(30):
        for name, session in sessions.items():
            request = request_of(engines[name])
            begun_s = time.perf_counter()
            session.run(request)
            durations_us[name].append(1e6 * (time.perf_counter() - begun_s))
    return {name: min(times) for name, times in durations_us.items()}


def rules_of(diagnosis: DiagnosisSpec, name: str) -> dict[str, str]:
    """The sentence of each finding on an engine by its rule, in their order."""
    return {finding.rule: finding.sentence for finding in diagnosis.engines[name].findings}
