"""ONNX, run by Intel's OpenVINO on the CPU: fp32, bf16, or the int8 graph that `onnx` builds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model import ModelSpec
from hpml.artifacts.operation import Operation
from hpml.core import hardware
from hpml.core.contract import Output
from hpml.core.errors import HpmlError, StageFailed
from hpml.targets.base import MOST_WEIGHTS, Built, NotBuilt, Profiler, Target
from hpml.targets.onnx import Onnx, refuse_saturating, saturation_reason
from hpml.tasks.base import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.targets.onnx_session import Feeds

# What is not int8 is computed in this; left alone, OpenVINO takes bf16 wherever the CPU has it.
_INFERENCE_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


class OpenVino(Target):
    """The `model.onnx` of the target `onnx` in OpenVINO; int8 where the model carries a quantization spec."""

    libraries: ClassVar[tuple[str, ...]] = ("openvino",)
    extra: ClassVar[str] = "openvino"
    profiler: ClassVar[Profiler | None] = "openvino"
    most_weights: ClassVar[int | None] = MOST_WEIGHTS

    target: Literal["openvino"] = "openvino"
    float_precision: Literal["fp32", "bf16"] = "fp32"  # of what is not int8
    opset: int = Field(default=20, ge=18, le=23)

    @property
    def label(self) -> str:
        """The target's name, and bf16 where that is asked for: a recipe may have both."""
        return self.target if self.float_precision == "fp32" else f"{self.target}-{self.float_precision}"

    def missing(self) -> str:
        """What this machine lacks; empty if nothing."""
        if importlib.util.find_spec("openvino") is None:
            return "the Python package openvino is not installed (pip install 'hpml-pipeline[openvino]')"
        if self.float_precision == "bf16" and not {"avx512_bf16", "amx_bf16"} & set(hardware.cpu_flags()):
            return "this CPU has no bf16 instructions (avx512_bf16 or amx_bf16)"
        return ""

    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Export, and quantize, as the target `onnx` does."""
        built = Onnx(opset=self.opset, device="cpu").build(model, data, out)
        return built if isinstance(built, NotBuilt) else self._as_run_here(built)

    def _as_run_here(self, built: Built) -> Built:
        """`built` and its variants as OpenVINO runs them."""
        return replace(
            built,
            precision=self.float_precision if built.precision == "fp32" else built.precision,
            identity=built.identity
            | {"runtime": f"openvino {_openvino().__version__}", "float_precision": self.float_precision},
            variants={name: self._as_run_here(variant) for name, variant in built.variants.items()},
        )

    def load(self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None) -> Runs:
        """The graph compiled for this CPU; OpenVINO has no switch for spinning."""
        if missing := self.missing():
            raise StageFailed(f"the OpenVINO engine in {folder} cannot run here", why=missing)
        refuse_saturating(folder, engine)
        files = engine.graphs or {"model": engine.file}
        return OpenVinoEngine(
            {
                graph: OpenVinoSession(folder / file, threads=threads, float_precision=self.float_precision)
                for graph, file in files.items()
            },
            engine.operations,
        )

    def foreign_reason(self, engine: EngineSpec) -> str:
        """A CPU that would compute other products."""
        return saturation_reason(engine)

    def candidates(self, engine: EngineSpec, threads: int) -> tuple[EngineSettings, ...]:
        """All threads, and one: few small layers gain by a second."""
        return tuple(EngineSettings(threads=count) for count in dict.fromkeys((threads, 1)))


@dataclass(frozen=True)
class RuntimeLayer:
    """A layer of the graph that OpenVINO made of the file, as its runtime describes and times it.

    nodes: the nodes of the file that were fused into it, by name or by what they give. precision and layout:
    of what it gives, in OpenVINO's words ("u8", "acdb"). inputs: the layers that feed it, weights apart.
    time_us: the mean of a request, in whole microseconds; None of what does not run.
    """

    name: str
    type: str
    kernel: str
    nodes: tuple[str, ...]
    precision: str
    layout: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    time_us: float | None


class OpenVinoEngine:
    """The graphs of an engine, each compiled once, asked by operation. One request at a time."""

    thread_safe = False

    def __init__(self, graphs: Mapping[str, OpenVinoSession], operations: Sequence[Operation]) -> None:
        self.operations = {one.name: one for one in operations}
        self.sessions = {one.name: graphs[one.graph] for one in operations}

    def run(self, feeds: Feeds, operation: str = "predict") -> dict[str, NDArray[Any]]:
        """The outputs of an operation by name; `feeds` has its inputs by name, the batch in front."""
        return self.sessions[operation].run(feeds)


class OpenVinoSession:
    """An ONNX file compiled by OpenVINO for requests, one at a time."""

    def __init__(self, file: Path, *, threads: int, float_precision: Literal["fp32", "bf16"]) -> None:
        """Compile `file` for so many threads.

        Raises StageFailed if OpenVINO cannot.
        """
        self._file = file
        self._options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": _INFERENCE_PRECISIONS[float_precision],
        }
        self._request = self._compiled().create_infer_request()

    def _compiled(self, **options: bool) -> Any:
        try:
            return _openvino().Core().compile_model(self._file, "CPU", {**self._options, **options})
        except HpmlError:  # a signal's
            raise
        except Exception as error:  # OpenVINO's derive from nothing narrower
            reason = " ".join(str(error).split())[:300]
            raise StageFailed(f"OpenVINO cannot load {self._file}", why=reason) from None

    def run(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """All outputs by name, of inputs by name."""
        answers = self._request.infer(dict(feeds), share_inputs=True)
        return {output.any_name: array for output, array in answers.items()}

    def profiled(self, requests: Sequence[Feeds], *, count: int) -> list[RuntimeLayer]:
        """The layers in the order they run, timed over `count` requests of `requests`, in turn."""
        compiled = self._compiled(PERF_COUNT=True)
        request = compiled.create_infer_request()
        for index in range(count):
            request.infer(dict(requests[index % len(requests)]), share_inputs=True)
        times_us = {
            one.node_name: one.real_time.total_seconds() * 1e6
            for one in request.profiling_info
            if one.status == one.Status.EXECUTED
        }
        operations = compiled.get_runtime_model().get_ordered_ops()
        constants = {one.get_friendly_name() for one in operations if _told(one, "layerType") == "Const"}
        return [
            _runtime_layer(one, constants, times_us.get(one.get_friendly_name()))
            for one in operations
            if one.get_friendly_name() not in constants
        ]


def _told(operation: Any, key: str) -> str:
    """What OpenVINO notes of an operation of its runtime's graph."""
    return str(operation.get_rt_info()[key].astype(str))


def _runtime_layer(operation: Any, constants: Collection[str], time_us: float | None) -> RuntimeLayer:
    shape = operation.get_output_partial_shape(0)
    fed = [value.get_node().get_friendly_name() for value in operation.input_values()]
    return RuntimeLayer(
        name=operation.get_friendly_name(),
        type=_told(operation, "layerType"),
        kernel=_told(operation, "primitiveType"),
        nodes=tuple(name for name in _told(operation, "originalLayersNames").split(",") if name),
        precision=_told(operation, "outputPrecisions"),
        layout=_told(operation, "outputLayouts"),
        shape=tuple(size.get_length() if size.is_static else -1 for size in shape),
        inputs=tuple(name for name in fed if name not in constants),
        time_us=time_us,
    )


def _openvino() -> ModuleType:
    """The library, without the package by which its model converter reports to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return importlib.import_module("openvino")
