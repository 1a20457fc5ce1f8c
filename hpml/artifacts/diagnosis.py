"""Why an engine is as fast as it is."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Config


class LayerFigures(Config):
    """One layer of an engine: what it computes, what it moves, how long it takes."""

    name: str
    op: str  # as the runtime calls it: "Conv", "QLinearConv", "aten::convolution", "CaskConvolution"
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    flops: int  # 2 per multiply-accumulate
    bytes: int  # weights, inputs and outputs, each once
    # a request, mean of the middle half; of ONNX Runtime less what its profiler adds: 0 if it is too short
    time_us: float
    bound: Literal["compute", "memory", "overhead"] | None = None  # None: the machine has no peak for it
    share_of_roof: float | None = None  # of what the roofs allow it; None where it does no arithmetic
    nodes: tuple[str, ...] = ()  # TensorRT's: the nodes of the ONNX graph that were fused into it
    formats: str = ""  # TensorRT's: the types and layouts of what goes in and out
    kernel: str = ""  # TensorRT's: the tactic that runs it


class Finding(Config):
    """One rule whose condition the measured facts meet."""

    rule: str
    sentence: str  # what was measured, in plain words with its figures
    remedy: str  # what to do about it; empty if nothing can be done


class EngineDiagnosis(Config):
    """Where the time of one engine goes, and why it is not faster."""

    status: Literal["diagnosed", "not diagnosed"]
    reason: str = ""  # why it was not
    device: Literal["cpu", "cuda"] = "cpu"  # whose peaks it is under
    threads: int = 0  # that it was measured with; 0 of versions before: those of the whole
    batch: int = 1
    flops: int = 0
    bytes: int = 0
    time_us: float = 0.0  # p50 of the benchmark at this batch
    profiled_us: float = 0.0  # what the layers add up to
    roof_us: float | None = None  # the least that the machine's peaks allow for all layers
    share_of_roof: float | None = None  # roof_us / time_us, if below 1
    bound: Literal["compute", "memory", "overhead"] | None = None
    layers: tuple[LayerFigures, ...] = ()
    verdict: str = ""  # one or two plain sentences
    findings: tuple[Finding, ...] = ()


class DiagnosisSpec(Config):
    """Why each engine of a run is not faster."""

    kind: Literal["diagnosis"] = "diagnosis"
    threads: int
    engines: dict[str, EngineDiagnosis]
    notes: tuple[str, ...] = ()  # what stands in for peaks that were not stable
