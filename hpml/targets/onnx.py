"""ONNX, run by ONNX Runtime: fp32, or int8 with Q/DQ nodes where the model asks for it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model import ModelSpec, QuantizationSpec
from hpml.artifacts.operation import Operation
from hpml.core import hardware
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.targets.base import MOST_WEIGHTS, Built, NotBuilt, Profiler, Target
from hpml.tasks import task_of
from hpml.tasks.base import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hpml.targets.onnx_int8 import Activations

FILE = "model.onnx"
_FEW_THREADS = 4
_LAUNCHES_ONLY = (
    "it runs on a GPU by ONNX Runtime, whose profiler sees there how long launching a node takes and not how "
    "long it runs: the published packages are built without NVIDIA's CUPTI"
)


class Onnx(Target):
    """`model.onnx` with a free batch, and a file for each further graph; int8 where the model says so.

    Whether signed or unsigned activations are faster depends on the machine and is for the benchmark to say:
    unless the spec says which, the engine comes with both.
    """

    libraries: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnxruntime-gpu")
    profiler: ClassVar[Profiler | None] = "onnxruntime"
    triton_platform: ClassVar[str] = "onnxruntime_onnx"
    is_standalone: ClassVar[bool] = True
    most_weights: ClassVar[int | None] = MOST_WEIGHTS

    target: Literal["onnx"] = "onnx"
    opset: int = Field(default=20, ge=18, le=23)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU for fp32, where ONNX Runtime has one

    def unsupported_reason(self) -> str:
        """Why this machine cannot run it; empty if it can."""
        if self.device == "cuda" and not hardware.gpu_names():
            return "device is cuda and this machine has no NVIDIA GPU; set device: cpu or auto"
        return ""

    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Export the model, and quantize the graph if its spec says so."""
        import onnxruntime

        from hpml import models
        from hpml.targets.onnx_graph import (
            export_graphs,
            layers_by_node,
            modules_of_graphs,
            nodes_of_layers,
            save_graph,
            to_int8,
        )
        from hpml.targets.onnx_int8 import SEVEN_BITS, candidate_activations, needs_7_bits, variant_of
        from hpml.tasks.effective_bits import LEAST_BITS

        quantization = model.spec.quantization
        network, task = models.load(model), task_of(model.spec.task)
        graphs = export_graphs(network, task, model.spec.operations, opset=self.opset)
        files = {name: file_of(name) for name in graphs}
        told = dict(files) if len(files) > 1 else {}
        main = files[model.spec.operations[0].graph]
        companions = task.runtime_files(network, model.spec.operations)
        for name, text in companions.items():
            (out.path / name).write_text(text, encoding="utf-8")
        identity = {
            "runtime": f"onnxruntime {onnxruntime.__version__}",
            "opset": str(self.opset),
            "device": self._device(quantization),
            "cpu_flags": " ".join(hardware.cpu_flags()),
        }
        if quantization is None:
            for name, graph in graphs.items():
                save_graph(graph, out.path / files[name])
            return Built(main, "fp32", identity, graphs=told, companions=tuple(companions))
        modules = modules_of_graphs(network, task)
        excluded = nodes_of_layers(graphs, quantization.excluded_layers, modules)
        layers = layers_by_node(graphs, modules)
        samples = calibration(model, network, data)

        def in_int8(activations: Activations, folder: Path) -> Built:
            folder.mkdir(exist_ok=True)
            seven_bits = needs_7_bits(activations)
            coarse: dict[str, float] = {}
            for name, file in files.items():
                left = to_int8(
                    fp32 / file,
                    folder / file,
                    quantization,
                    samples[name],
                    activations=activations,
                    excluded_nodes=excluded[name],
                    operators=task.int8_operators,
                    reduce_range=seven_bits,
                )
                coarse |= {layers[name][node]: bits for node, bits in left.items()}
            of_int8 = {"activations": activations, "weight_bits": "7" if seven_bits else "8"}
            notes = [SEVEN_BITS] if seven_bits else []
            if coarse:
                named = ", ".join(f"{layer} ({bits:.1f})" for layer, bits in coarse.items())
                notes.append(f"in fp32, as their inputs keep fewer than {LEAST_BITS:g} of 8 bits: {named}")
            return Built(main, "int8", identity | of_int8, tuple(notes), graphs=told)

        with tempfile.TemporaryDirectory(dir=out.scratch) as scratch:
            fp32 = Path(scratch)
            for name, graph in graphs.items():
                save_graph(graph, fp32 / files[name])
            default, *others = candidate_activations(quantization.activations)
            variants = {variant_of(kind): in_int8(kind, out.path / variant_of(kind)) for kind in others}
            built = in_int8(default, out.path)
            return replace(built, variants=variants, companions=tuple(companions))

    def _device(self, quantization: QuantizationSpec | None) -> str:
        from hpml.targets.onnx_session import has_cuda

        if self.device == "cpu":
            return "cpu"
        if self.device == "cuda" and not has_cuda():
            raise StageFailed(
                "device is cuda and this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu in place of onnxruntime, or set device: cpu",
            )
        # The CUDA provider has no int8 convolutions: it would dequantize everything and run it in fp32.
        return "cuda" if has_cuda() and hardware.gpu_names() and quantization is None else "cpu"

    def load(self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None) -> Runs:
        """An ONNX Runtime session on the device the engine was built for."""
        from hpml.targets.onnx_session import OnnxEngine, OnnxSession, has_cuda

        device = engine.identity["device"]
        if device == "cuda" and not has_cuda():
            raise StageFailed(
                f"the engine in {folder} runs on a GPU",
                why="this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu, or export it again with device: cpu",
            )
        refuse_saturating(folder, engine)
        files = engine.graphs or {"model": engine.file}
        return OnnxEngine(
            {
                graph: OnnxSession(folder / file, device=device, threads=threads, spinning=spinning)
                for graph, file in files.items()
            },
            engine.operations,
        )

    def foreign_reason(self, engine: EngineSpec) -> str:
        """A GPU that is not here, or a CPU that would compute other products."""
        if engine.identity.get("device") == "cuda" and not hardware.gpu_names():
            return "it runs on a GPU, and this machine has no NVIDIA GPU"
        return saturation_reason(engine)

    def candidates(self, engine: EngineSpec, threads: int) -> tuple[EngineSettings, ...]:
        """On the CPU those of `cpu_candidates`; on a GPU one."""
        if engine.identity["device"] == "cuda":
            return super().candidates(engine, threads)
        return cpu_candidates(threads)

    def unprofiled_reason(self, engine: EngineSpec, files: Collection[str]) -> str:
        """Its layers are timed on the CPU."""
        return _LAUNCHES_ONLY if engine.identity["device"] == "cuda" else ""


def refuse_saturating(folder: Path, engine: EngineSpec) -> None:
    """Raise StageFailed if this CPU would compute other products than the one that `engine` was built on."""
    if why := saturation_reason(engine):
        raise StageFailed(
            f"the int8 engine in {folder} cannot run here", why=why, fix="export it again on this machine"
        )


def needs_vnni(engine: EngineSpec) -> bool:
    """Whether its products of uint8 and int8 would saturate on a CPU that has AVX2 without VNNI."""
    return engine.identity.get("activations") == "uint8" and engine.identity.get("weight_bits") == "8"


def saturation_reason(engine: EngineSpec) -> str:
    """Why this CPU would compute other products than the one `engine` was built on; empty if it would not."""
    if needs_vnni(engine) and hardware.products_saturate():
        return (
            "it was built for CPUs with VNNI: on this one its products would saturate and its answers change"
        )
    return ""


def cpu_candidates(threads: int) -> tuple[EngineSettings, ...]:
    """The settings of ONNX Runtime on the CPU worth trying with at most `threads` threads, its default first.

    One thread has no pool whose threads could spin. Many lose to fewer where two CPUs share a core, or are
    far from each other.
    """
    alone = EngineSettings(threads=1)
    if threads == 1:
        return (alone,)
    pools = [EngineSettings(threads=threads, spinning=spinning) for spinning in (True, False)]
    if threads > _FEW_THREADS:
        pools.append(EngineSettings(threads=threads // 2, spinning=True))
    return (*pools, alone)


def file_of(graph: str) -> str:
    """The name of a graph's file."""
    return FILE if graph == "model" else f"{graph}.onnx"


def calibration(
    model: Artifact[ModelSpec], network: nn.Module, data: Artifact[DatasetSpec]
) -> dict[str, dict[str, NDArray[Any]]]:
    """What each graph of `network` takes for the rows that the model's quantization spec names, by input."""
    from hpml.tasks.torch_session import TorchSession

    assert model.spec.quantization is not None
    task = task_of(model.spec.task)
    rows = list(model.spec.quantization.calibration_rows)
    stored = {name: array[rows] for name, array in task.stored(data, "train").items()}
    runs = TorchSession(network, task, model.spec.operations)
    first: dict[str, Operation] = {}
    for operation in model.spec.operations:
        first.setdefault(operation.graph, operation)
    return {graph: dict(task.calibration_requests(runs, stored, one)) for graph, one in first.items()}
