"""NVIDIA TensorRT: a plan compiled for one GPU model by one version of TensorRT."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.core import hardware, regular_files
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.targets.base import MOST_WEIGHTS, Built, NotBuilt, Precision, Profiler, Target
from hpml.targets.onnx import calibration
from hpml.tasks import task_of
from hpml.tasks.base import Runs

if TYPE_CHECKING:
    import onnx

FILE = "model.plan"
GRAPH = "graph.onnx"  # what the plan was compiled from, without its weights: says what its layers compute
_LARGEST_KEPT = 64  # elements of a constant: shapes, axes and scales stay


class TensorRT(Target):
    """A plan with a batch of 1 to `max_batch`; int8 where the model carries a quantization spec."""

    libraries: ClassVar[tuple[str, ...]] = ("tensorrt",)
    extra: ClassVar[str] = "tensorrt"
    profiler: ClassVar[Profiler | None] = "tensorrt"
    triton_platform: ClassVar[str] = "tensorrt_plan"
    most_weights: ClassVar[int | None] = MOST_WEIGHTS

    target: Literal["tensorrt"] = "tensorrt"
    float_precision: Literal["fp16", "fp32"] = "fp16"  # of a model without a quantization spec
    optimal_batch: int = Field(default=1, ge=1)  # the batch that kernels are chosen for
    max_batch: int = Field(default=64, ge=1, le=4096)
    optimization_level: int = Field(default=3, ge=0, le=5)  # higher builds longer and may run faster
    workspace_mb: int = Field(default=1024, ge=1)  # GPU memory that a kernel may use while it runs
    timing_cache: str = ""  # a file that keeps kernel timings between builds; empty: none
    opset: int = Field(default=20, ge=18, le=20)
    # where the GPU or the library is absent: a line in the report that says so, or exit 3
    when_absent: Literal["report", "refuse"] = "report"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.optimal_batch > self.max_batch:
            raise ValueError(f"optimal_batch {self.optimal_batch} is above max_batch {self.max_batch}")
        return self

    @property
    def decides_by_timing(self) -> bool:
        """The builder times kernels to choose among them."""
        return True

    def missing(self) -> str:
        """What this machine lacks; empty if nothing."""
        if not hardware.gpu_names():
            return "this machine has no NVIDIA GPU"
        if importlib.util.find_spec("tensorrt") is None:
            return "the Python package tensorrt is not installed (pip install 'hpml-pipeline[tensorrt]')"
        return ""

    def unsupported_reason(self) -> str:
        """What is missing, where the recipe insists on an engine."""
        missing = self.missing()
        if missing and self.when_absent == "refuse":
            return f"target tensorrt: {missing}"
        cache = Path(self.timing_cache)
        why = regular_files.problem(cache) if self.timing_cache and cache.exists() else ""
        return f"target tensorrt: timing_cache {cache} {why}" if why else ""

    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Export the model to ONNX in the precision it will run in, and compile that."""
        import onnx

        from hpml import models
        from hpml.targets import tensorrt_engine
        from hpml.targets.onnx_graph import export_graphs, nodes_of_layers, save_graph, to_fp16, to_int8

        if missing := tensorrt_engine.missing():
            return NotBuilt(missing)
        quantization = model.spec.quantization
        [operation, *more] = model.spec.operations
        if more:
            return NotBuilt(
                f"plans have one operation, and the network has {1 + len(more)}; export it to onnx"
            )
        network = models.load(model)
        graphs = export_graphs(network, task_of(model.spec.task), (operation,), opset=self.opset)
        [graph] = graphs.values()
        [excluded] = nodes_of_layers(graphs, quantization.excluded_layers if quantization else ()).values()
        with tempfile.TemporaryDirectory(dir=out.scratch) as scratch:
            file = Path(scratch) / "model.onnx"
            save_graph(graph, file)
            precision: Precision = self.float_precision
            if quantization:
                precision = "int8"
                to_int8(
                    file,
                    file,
                    quantization,
                    calibration(model, network, data)[operation.graph],
                    activations="int8",
                    excluded_nodes=excluded,
                    for_tensorrt=True,
                )
            elif precision == "fp16":
                save_graph(to_fp16(onnx.load(file)), file)
            plan = tensorrt_engine.compile_plan(
                file,
                operation,
                optimal_batch=self.optimal_batch,
                max_batch=self.max_batch,
                optimization_level=self.optimization_level,
                workspace_bytes=self.workspace_mb * 2**20,
                timing_cache=Path(self.timing_cache) if self.timing_cache else None,
            )
            save_graph(without_weights(onnx.load(file)), out.path / GRAPH)
        (out.path / FILE).write_bytes(plan)
        return Built(FILE, precision, tensorrt_engine.identity(), companions=(GRAPH,))

    def load(self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None) -> Runs:
        """The plan on this machine's GPU. Loading a plan is running code: open verified artifacts only."""
        if missing := self.missing():
            raise StageFailed(f"the TensorRT engine in {folder} cannot run here", why=missing)
        from hpml.targets import tensorrt_engine

        here = tensorrt_engine.identity()
        differs = [
            f"{key} {engine.identity.get(key, 'unknown')!r}, here {here[key]!r}"
            for key in here
            if engine.identity.get(key) != here[key]
        ]
        if differs:
            raise StageFailed(
                f"the TensorRT engine in {folder} was built for another machine",
                why="; ".join(differs),
                fix="export it again on this machine",
            )
        [operation] = engine.operations
        return tensorrt_engine.PlanSession(folder / engine.file, operation, max_batch=self.max_batch)

    def foreign_reason(self, engine: EngineSpec) -> str:
        """Another GPU than the one it was compiled on; `load` compares the versions of the software, too."""
        built_on = engine.identity.get("device", "").removeprefix("cuda ")
        here = hardware.gpu_names()
        if built_on in here:
            return ""
        found = ", ".join(here) or "no NVIDIA GPU"
        return f"its plan was compiled on {built_on or 'a GPU'}, and this machine has {found}"

    def unprofiled_reason(self, engine: EngineSpec, files: Collection[str]) -> str:
        """What its layers compute is read from the graph beside it."""
        return "" if GRAPH in files else f"it holds no {GRAPH}; export it again"


def without_weights(graph: onnx.ModelProto) -> onnx.ModelProto:
    """`graph` with its weights for inputs: their names and shapes stay, the numbers go."""
    from onnx import helper

    weights = graph.graph.initializer
    large = [index for index, tensor in enumerate(weights) if math.prod(tensor.dims) > _LARGEST_KEPT]
    graph.graph.input.extend(
        helper.make_tensor_value_info(weights[index].name, weights[index].data_type, weights[index].dims)
        for index in large
    )
    for index in reversed(large):
        del weights[index]
    return graph
