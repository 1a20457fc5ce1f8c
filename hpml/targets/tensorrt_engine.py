"""TensorRT 10 and later, by its Python API, with torch for the memory of the GPU.

Networks are strongly typed: from version 11 on nothing else exists, so the precision of every tensor is
that of the ONNX graph, and int8 is where its Q/DQ nodes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt
import torch
from numpy.typing import NDArray

from hpml.artifacts.operation import Operation
from hpml.core import hardware
from hpml.core.atomic_files import write_bytes_atomic
from hpml.core.batches import batches
from hpml.core.errors import StageFailed

Feeds = Mapping[str, NDArray[Any]]


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
    operation: Operation,
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
    for one in operation.inputs:
        _batch, *sizes = one.shape
        profile.set_shape(one.name, (1, *sizes), (optimal_batch, *sizes), (max_batch, *sizes))
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

    def __init__(self, file: Path, operation: Operation, *, max_batch: int) -> None:
        """Load the plan in `file`. Raises StageFailed if TensorRT refuses it."""
        self._log = _Log()
        self._runtime = trt.Runtime(self._log)  # has to outlive its engine
        engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if engine is None:
            raise self._log.failure(f"TensorRT cannot load {file}")
        self.operations = {operation.name: operation}
        self._inputs = [one.name for one in operation.inputs]
        self._outputs = {one.name: getattr(torch, one.dtype) for one in operation.outputs}
        self._engine, self._context = engine, engine.create_execution_context()
        # The plan knows its layers in detail; naming them so to NVIDIA's tools would slow each request down.
        self._context.nvtx_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
        self._max_batch = max_batch
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, feeds: Feeds, operation: str = "predict") -> dict[str, NDArray[Any]]:
        """The outputs by name; `feeds` has the inputs by name, the batch in front, of any size."""
        rows = len(feeds[self._inputs[0]])
        parts = [
            self._run({name: feeds[name][part] for name in self._inputs})
            for part in batches(rows, self._max_batch)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._outputs}

    def _run(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        with torch.cuda.stream(self.stream):
            inputs = {
                name: torch.from_numpy(np.ascontiguousarray(feeds[name])).cuda() for name in self._inputs
            }
            for name, tensor in inputs.items():
                self._context.set_input_shape(name, tuple(tensor.shape))
                self._context.set_tensor_address(name, tensor.data_ptr())
            outputs = {
                name: torch.empty(tuple(self._context.get_tensor_shape(name)), dtype=dtype, device="cuda")
                for name, dtype in self._outputs.items()
            }
            for name, tensor in outputs.items():
                self._context.set_tensor_address(name, tensor.data_ptr())
            done = self._context.execute_async_v3(self.stream.cuda_stream)
            answers = {name: tensor.cpu() for name, tensor in outputs.items()}  # waits for the stream
        if not done:
            raise self._log.failure("TensorRT could not run the engine")
        return {name: tensor.numpy() for name, tensor in answers.items()}

    def profiled(self, requests: Sequence[Feeds], *, count: int) -> tuple[list[list[tuple[str, float]]], str]:
        """The layers that ran in each of `count` requests, one of `requests` after the other, with their
        milliseconds on the GPU; and what TensorRT's inspector says of the layers at batch 1, as JSON.

        Requests take longer from then on: with a profiler, TensorRT waits for each.
        """
        times = _LayerTimes()
        self._context.profiler = (
            times  # reports before a request returns: enqueue_emits_profile is its default
        )
        for index in range(count):
            times.inferences.append([])
            self._run(requests[index % len(requests)])
        inspector = self._engine.create_engine_inspector()
        inspector.execution_context = self._context  # has shapes, where the plan has a range of them
        return times.inferences, inspector.get_engine_information(trt.LayerInformationFormat.JSON)
