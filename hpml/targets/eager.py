"""torch as it is: no compiler, no other runtime. The reference of every speed-up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model import ModelSpec
from hpml.core import hardware
from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.targets.base import Built, NotBuilt, Profiler, Target
from hpml.tasks import task_of
from hpml.tasks.base import Runs

DESCRIPTION = "model.json"


class Eager(Target):
    """The network run by torch itself, in full fp32."""

    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    profiler: ClassVar[Profiler | None] = "torch"

    target: Literal["eager"] = "eager"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where torch has one

    def unsupported_reason(self) -> str:
        """Why this machine cannot run it; empty if it can."""
        if self.device == "cuda" and not hardware.gpu_names():
            return "device is cuda and this machine has no NVIDIA GPU; set device: cpu or auto"
        return ""

    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Write `model.json`, the model's manifest, and `model.safetensors`."""
        import torch

        from hpml import models

        if model.spec.quantization:
            return NotBuilt("torch eager has no int8 kernels; export a quantized model to onnx or tensorrt")
        models.save(models.load(model), out.path)
        write_text_atomic(out.path / DESCRIPTION, model.spec.model_dump_json())
        gpu = self.device != "cpu" and torch.cuda.is_available()
        device = f"cuda {torch.cuda.get_device_name()}" if gpu else "cpu"
        return Built(DESCRIPTION, "fp32", {"runtime": f"torch {torch.__version__}", "device": device})

    def load(self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None) -> Runs:
        """The network of `model.json` on the device it was built for."""
        import torch

        from hpml import models
        from hpml.tasks.torch_session import TorchSession

        device = engine.identity["device"].partition(" ")[0]
        if device == "cuda" and not torch.cuda.is_available():
            raise StageFailed(
                f"the engine in {folder} runs on {engine.identity['device']}",
                why="torch finds no GPU here",
                fix="export it again on this machine",
            )
        torch.set_num_threads(threads)
        # TF32 would round the products of an fp32 network to 11 bits.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        spec = ModelSpec.model_validate_json((folder / engine.file).read_bytes())
        network = models.load_weights(models.rebuild(spec), folder / models.WEIGHTS)
        return TorchSession(network, task_of(spec.task), spec.operations, device)

    def candidates(self, engine: EngineSpec, threads: int) -> tuple[EngineSettings, ...]:
        """As users run it: torch has a thread for each physical core unless it is told otherwise."""
        return (EngineSettings(threads=min(threads, hardware.usable_cores())),)

    def unprofiled_reason(self, engine: EngineSpec, files: Collection[str]) -> str:
        """Its layers are timed on the CPU."""
        device = engine.identity["device"]
        on_cpu = device.startswith("cpu")
        return "" if on_cpu else f"it runs on {device}, and layers of eager are timed on the CPU only"
