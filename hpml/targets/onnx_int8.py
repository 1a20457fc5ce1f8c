"""Any fp32 ONNX graph in int8: Q/DQ nodes, calibrated, with signed or unsigned activations.

Does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from hpml.artifacts.model import QuantizationSpec
from hpml.core import hardware
from hpml.targets.onnx_session import Feeds
from hpml.targets.quiet import quiet
from hpml.tasks.images import batches

Activations = Literal["uint8", "int8"]

_LARGEST_BATCH = 32
SEVEN_BITS = "weights have 7 bits: uint8 x int8 products saturate on the CPU it was built on"

# What ONNX Runtime's guide asks of a graph for TensorRT: zero points of 0, weights left as fp32 behind their
# own Q/DQ, biases as they are, no Q/DQ on the outputs.
_TENSORRT_OPS = ["Conv", "Gemm", "MatMul", "Add"]
_TENSORRT_OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "DedicatedQDQPair": True,
    "QuantizeBias": False,
    "OpTypesToExcludeOutputQuantization": _TENSORRT_OPS,
}


class _Batches(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, samples: Feeds, batch: int | None) -> None:
        rows = min(len(array) for array in samples.values())
        if batch is None:  # in equal batches: the percentile calibrator stacks what they give
            batch = next(size for size in range(min(rows, _LARGEST_BATCH), 0, -1) if rows % size == 0)
        self._parts = (
            {name: array[part] for name, array in samples.items()}
            for part in batches(rows - rows % batch, batch)
        )

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._parts, None)


def quantize_graph(
    fp32: Path,
    place: Path,
    spec: QuantizationSpec,
    samples: Feeds,
    *,
    activations: Activations,
    excluded_nodes: list[str],
    batch: int | None = None,
    reduce_range: bool = False,
    fold: bool = False,
    for_tensorrt: bool = False,
) -> None:
    """Write the graph of the file `fp32` with Q/DQ nodes to `place`, calibrated with `samples`.

    batch: the only one that the graph takes. reduce_range: weights of 7 bits, which a CPU needs whose uint8 x
    int8 products saturate in 16 bits. fold: have ONNX Runtime fold constants and batch norms first;
    our own exporter has done so.
    """
    # By path: given a graph, the quantizer moves its weights into a file of its own and leaves it hollow.
    prepared = place.with_suffix(".prepared.onnx")
    with quiet():
        quant_pre_process(fp32, prepared, skip_optimization=not fold, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            place,
            _Batches(samples, batch),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_TENSORRT_OPS if for_tensorrt else None,
            per_channel=spec.weights == "int8-per-channel",
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded_nodes,
            calibrate_method=CalibrationMethod.Percentile
            if spec.calibration == "percentile"
            else CalibrationMethod.MinMax,
            extra_options=dict(_TENSORRT_OPTIONS) if for_tensorrt else {"CalibTensorRangeSymmetric": False},
        )
    prepared.unlink()


# ----------------------------------------------------------------------------------------- signed or unsigned


def candidate_activations(wanted: Literal["auto", "uint8", "int8"]) -> tuple[Activations, ...]:
    """What an int8 graph is built with; first what is used where nothing was measured."""
    return ("uint8", "int8") if wanted == "auto" else (wanted,)


def variant_of(activations: Activations) -> str:
    """What a build that is not the first of its candidates is called."""
    return f"{activations}-activations"


def needs_7_bits(activations: Activations) -> bool:
    """Whether weights beside such activations have to be of 7 bits on this CPU."""
    return activations == "uint8" and hardware.products_saturate()
