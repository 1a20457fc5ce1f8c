"""TensorRT 10 and later, by its Python API, with torch for the memory of the GPU.

Networks are strongly typed: from version 11 on nothing else exists, so the precision of every tensor is
that of the ONNX graph, and int8 is where its Q/DQ nodes are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorrt as trt
import torch
from numpy.typing import NDArray

from hpml.artifacts.model_input import InputSpec
from hpml.core import hardware
from hpml.core.atomic_files import write_bytes_atomic
from hpml.core.errors import StageFailed
from hpml.tasks.images import batches


class _Log(trt.ILogger):  # type: ignore[misc]
    """Keeps what TensorRT complains of; its own logger writes to stdout."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.complaints: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.complaints.append(message)

    def failure(self, what: str) -> StageFailed:
        return StageFailed(what, why=" ".join("; ".join(self.complaints).split())[:300])


def missing() -> str:
    """What torch lacks to hold a GPU's memory; empty if nothing."""
    return (
        "" if torch.cuda.is_available() else "torch finds no GPU: it is a CPU build, or the driver is too old"
    )


def identity() -> dict[str, str]:
    """What a plan is bound to."""
    major, minor = torch.cuda.get_device_capability()
    return {
        "runtime": f"tensorrt {trt.__version__}",
        "device": f"cuda {torch.cuda.get_device_name()}",
        "compute_capability": f"{major}.{minor}",
        "driver": hardware.gpu_driver() or "unknown",
    }


def compile_plan(
    graph: Path,
    spec: InputSpec,
    *,
    optimal_batch: int,
    max_batch: int,
    optimization_level: int,
    workspace_bytes: int,
    timing_cache: Path | None,
) -> bytes:
    """The serialized plan of the ONNX file `graph`.

    Raises StageFailed with TensorRT's own words if it cannot parse or build it.
    """
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(graph.read_bytes()):
        log.complaints += [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise log.failure("TensorRT cannot parse the exported graph")

    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.builder_optimization_level = optimization_level
    config.clear_flag(trt.BuilderFlag.TF32)  # it would round the products of fp32 layers to 11 bits
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that a diagnosis can tell its layers
    profile = builder.create_optimization_profile()
    profile.set_shape(
        spec.name, (1, *spec.shape_chw), (optimal_batch, *spec.shape_chw), (max_batch, *spec.shape_chw)
    )
    config.add_optimization_profile(profile)
    known = timing_cache.read_bytes() if timing_cache and timing_cache.exists() else b""
    config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)

    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise log.failure("TensorRT cannot build the exported graph")
    if timing_cache:
        write_bytes_atomic(timing_cache, bytes(config.get_timing_cache().serialize()))
    return bytes(plan)


class _LayerTimes(trt.IProfiler):  # type: ignore[misc]
    """Keeps what TensorRT reports of each inference: its layers in the order they ran, and milliseconds."""

    def __init__(self) -> None:
        trt.IProfiler.__init__(self)
        self.inferences: list[list[tuple[str, float]]] = []

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        self.inferences[-1].append((layer_name, ms))


class PlanSession:
    """A plan on its GPU, with a stream of its own. Its execution context is for one thread at a time."""

    thread_safe = False

    def __init__(self, file: Path, *, max_batch: int) -> None:
        """Load the plan in `file`. Raises StageFailed if TensorRT refuses it."""
        self._log = _Log()
        self._runtime = trt.Runtime(self._log)  # has to outlive its engine
        engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if engine is None:
            raise self._log.failure(f"TensorRT cannot load {file}")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._input, self._output = sorted(
            names, key=lambda name: engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT
        )
        self._engine, self._context = engine, engine.create_execution_context()
        # The plan knows its layers in detail; naming them so to NVIDIA's tools would slow each request down.
        self._context.nvtx_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
        self._max_batch = max_batch
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def predict(self, x_nchw: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits, float32 (batch, classes), of float32 images (batch, channels, height, width)."""
        parts = [self._predict(x_nchw[part]) for part in batches(len(x_nchw), self._max_batch)]
        return np.concatenate(parts)

    def _predict(self, x_nchw: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.cuda.stream(self.stream):
            x = torch.from_numpy(np.ascontiguousarray(x_nchw)).cuda()
            self._context.set_input_shape(self._input, tuple(x.shape))
            logits = torch.empty(tuple(self._context.get_tensor_shape(self._output)), device="cuda")
            self._context.set_tensor_address(self._input, x.data_ptr())
            self._context.set_tensor_address(self._output, logits.data_ptr())
            done = self._context.execute_async_v3(self.stream.cuda_stream)
            answer = logits.cpu()  # waits for the stream
        if not done:
            raise self._log.failure("TensorRT could not run the engine")
        return answer.numpy()

    def profiled(
        self, x_nchw: NDArray[np.float32], *, requests: int
    ) -> tuple[list[list[tuple[str, float]]], str]:
        """The layers that ran in each of some requests of one image, with their milliseconds on the GPU; and
        what TensorRT's inspector says of the layers at batch 1, as JSON.

        Requests take longer from then on: with a profiler, TensorRT waits for each.
        """
        times = _LayerTimes()
        self._context.profiler = (
            times  # reports before a request returns: enqueue_emits_profile is its default
        )
        for index in range(requests):
            row = index % len(x_nchw)
            times.inferences.append([])
            self._predict(x_nchw[row : row + 1])
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context  # has shapes, where the plan has a range of them
        return times.inferences, inspector.get_engine_information(trt.LayerInformationFormat.JSON)
