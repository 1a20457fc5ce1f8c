"""ONNX, run by ONNX Runtime: fp32, or int8 with Q/DQ nodes where the model asks for it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model import ModelSpec, QuantizationSpec
from hpml.core import hardware
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.targets.base import Built, NotBuilt, Profiler, Session, Target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpml.targets.onnx_int8 import Activations

FILE = "model.onnx"
_FEW_THREADS = 4
_LAUNCHES_ONLY = (
    "it runs on a GPU by ONNX Runtime, whose profiler sees there how long launching a node takes and not how "
    "long it runs: the published packages are built without NVIDIA's CUPTI"
)


class Onnx(Target):
    """One `model.onnx` with a free batch; int8 where the model carries a quantization spec.

    Whether signed or unsigned activations are faster depends on the machine and is for the benchmark to say:
    unless the spec says which, the engine comes with both.
    """

    libraries: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnxruntime-gpu")
    profiler: ClassVar[Profiler | None] = "onnxruntime"
    triton_platform: ClassVar[str] = "onnxruntime_onnx"
    is_standalone: ClassVar[bool] = True

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
        from hpml.targets.onnx_graph import export_graph, nodes_of_layers, save_graph, to_int8
        from hpml.targets.onnx_int8 import SEVEN_BITS, candidate_activations, needs_7_bits, variant_of

        quantization = model.spec.quantization
        graph = export_graph(models.load(model), model.spec.input, opset=self.opset)
        identity = {
            "runtime": f"onnxruntime {onnxruntime.__version__}",
            "opset": str(self.opset),
            "device": self._device(quantization),
            "cpu_flags": " ".join(hardware.cpu_flags()),
        }
        if quantization is None:
            save_graph(graph, out.path / FILE)
            return Built(FILE, "fp32", identity)
        excluded = nodes_of_layers(graph, quantization.excluded_layers)
        samples = calibration(model, data)

        def in_int8(activations: Activations, folder: Path) -> Built:
            folder.mkdir(exist_ok=True)
            seven_bits = needs_7_bits(activations)
            to_int8(
                fp32,
                folder / FILE,
                quantization,
                samples,
                activations=activations,
                excluded_nodes=excluded,
                reduce_range=seven_bits,
            )
            told = {"activations": activations, "weight_bits": "7" if seven_bits else "8"}
            return Built(FILE, "int8", identity | told, (SEVEN_BITS,) if seven_bits else ())

        with tempfile.TemporaryDirectory(dir=out.scratch) as scratch:
            fp32 = Path(scratch) / FILE
            save_graph(graph, fp32)
            default, *others = candidate_activations(quantization.activations)
            variants = {variant_of(kind): in_int8(kind, out.path / variant_of(kind)) for kind in others}
            return replace(in_int8(default, out.path), variants=variants)

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

    def load(
        self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None
    ) -> Session:
        """An ONNX Runtime session on the device the engine was built for."""
        from hpml.targets.onnx_session import OnnxSession, has_cuda

        device = engine.identity["device"]
        if device == "cuda" and not has_cuda():
            raise StageFailed(
                f"the engine in {folder} runs on a GPU",
                why="this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu, or export it again with device: cpu",
            )
        refuse_saturating(folder, engine)
        return OnnxSession(folder / engine.file, device=device, threads=threads, spinning=spinning)

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
    u8s8 = engine.identity.get("activations") == "uint8" and engine.identity.get("weight_bits") == "8"
    if u8s8 and hardware.products_saturate():
        raise StageFailed(
            f"the int8 engine in {folder} was built for CPUs with VNNI",
            why="on this one its products would saturate and its answers change",
            fix="export it again on this machine",
        )


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


def calibration(model: Artifact[ModelSpec], data: Artifact[DatasetSpec]) -> NDArray[np.float32]:
    """The images that the model's quantization spec names, as float32 (rows, channels, height, width)."""
    from hpml.tasks.images import load_split, to_x_nchw

    assert model.spec.quantization is not None
    images_nhwc, _ = load_split(data, "train")
    return to_x_nchw(images_nhwc[list(model.spec.quantization.calibration_rows)], model.spec.input)
