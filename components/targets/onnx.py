"""ONNX, run by ONNX Runtime: fp32, or int8 with Q/DQ nodes where the model asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from components import hardware
from components.artifacts import Artifact, DatasetSpec, EngineSpec, ModelSpec, QuantizationSpec
from components.contract import Output
from components.errors import StageFailed
from components.targets.base import Built, NotBuilt, Session, Target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from components.targets.onnx_int8 import Activations, Choice

FILE = "model.onnx"


class Onnx(Target):
    """One `model.onnx` with a free batch; int8 where the model carries a quantization spec."""

    target: Literal["onnx"] = "onnx"
    opset: int = Field(default=20, ge=18, le=23)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU for fp32, where ONNX Runtime has one

    def unmet(self) -> str:
        """Why this machine cannot run it; empty if it can."""
        if self.device == "cuda" and not hardware.gpu_names():
            return "device is cuda and this machine has no NVIDIA GPU; set device: cpu or auto"
        return ""

    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Export the model, and quantize the graph if its spec says so."""
        import onnxruntime

        from components import models
        from components.targets.onnx_graph import export_graph, nodes_of_layers, save_graph

        quantization = model.spec.quantization
        graph = export_graph(models.load(model), model.spec.input, opset=self.opset)
        excluded = nodes_of_layers(graph, quantization.excluded_layers) if quantization else []
        file = out.path / FILE
        save_graph(graph, file)
        identity = {
            "runtime": f"onnxruntime {onnxruntime.__version__}",
            "opset": str(self.opset),
            "device": self._device(quantization),
            "cpu_flags": " ".join(hardware.cpu_flags()),
        }
        if quantization is None:
            return Built(FILE, "fp32", identity)
        choice = _quantize(file, quantization, excluded, calibration(model, data), out)
        identity |= {"activations": choice.activations, "weight_bits": str(choice.weight_bits)}
        metrics = {f"latency_ms_{kind}_activations": value for kind, value in choice.latencies_ms.items()}
        return Built(FILE, "int8", identity, choice.notes, metrics)

    def _device(self, quantization: QuantizationSpec | None) -> str:
        from components.targets.onnx_session import has_cuda

        if self.device == "cpu":
            return "cpu"
        if self.device == "cuda" and not has_cuda():
            raise StageFailed(
                "device is cuda and this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu in place of onnxruntime, or set device: cpu",
            )
        # The CUDA provider has no int8 convolutions: it would dequantize everything and run it in fp32.
        return "cuda" if has_cuda() and hardware.gpu_names() and quantization is None else "cpu"

    def load(self, folder: Path, engine: EngineSpec, *, threads: int) -> Session:
        """An ONNX Runtime session on the device the engine was built for."""
        from components.targets.onnx_session import OnnxSession, has_cuda

        device = engine.identity["device"]
        if device == "cuda" and not has_cuda():
            raise StageFailed(
                f"the engine in {folder} runs on a GPU",
                why="this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu, or export it again with device: cpu",
            )
        u8s8 = engine.identity.get("activations") == "uint8" and engine.identity.get("weight_bits") == "8"
        if u8s8 and products_saturate():
            raise StageFailed(
                f"the int8 engine in {folder} was built for CPUs with VNNI",
                why="on this one its products would saturate and its answers change",
                fix="export it again on this machine",
            )
        return OnnxSession(folder / engine.file, device=device, threads=threads)


def calibration(model: Artifact[ModelSpec], data: Artifact[DatasetSpec]) -> NDArray[np.float32]:
    """The images that the model's quantization spec names, as float32 (rows, channels, height, width)."""
    from components.images import load_split, to_x_nchw

    assert model.spec.quantization is not None
    images_nhwc, _ = load_split(data, "train")
    return to_x_nchw(images_nhwc[list(model.spec.quantization.calibration_rows)], model.spec.input)


def products_saturate() -> bool:
    """Whether this CPU adds pairs of uint8 x int8 products in 16 bits, where large weights overflow."""
    flags = hardware.cpu_flags()
    return "avx2" in flags and not {"avx512_vnni", "avx_vnni"} & set(flags)


def _quantize(
    file: Path, spec: QuantizationSpec, excluded: list[str], x_nchw: NDArray[np.float32], out: Output
) -> Choice:
    """Replace the fp32 graph in `file` by its int8 one."""
    import onnx

    from components.targets.onnx_graph import to_int8
    from components.targets.onnx_int8 import choose_activations, needs_7_bits

    def write(place: Path, activations: Activations) -> None:
        to_int8(
            file,
            place,
            spec,
            x_nchw,
            activations=activations,
            excluded_nodes=excluded,
            reduce_range=needs_7_bits(activations),
        )

    request = {onnx.load(file).graph.input[0].name: x_nchw[:1]}
    return choose_activations(write, spec.activations, request, file, scratch=out.scratch)
