"""Any fp32 ONNX graph in int8: Q/DQ nodes, calibrated, with signed or unsigned activations.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
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
from hpml.core.batches import batches
from hpml.targets.onnx_session import Feeds, OnnxSession
from hpml.targets.quiet import quiet
from hpml.tasks.effective_bits import LEAST_BITS, effective_bits

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


_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}  # int8 is for these, whatever they are fed with
_BOUNDED = {"Softmax", "LogSoftmax", "Sigmoid", "Tanh"}  # what comes out of them is of no mask's range


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
    operators: Sequence[str] = (),
    batch: int | None = None,
    reduce_range: bool = False,
    fold: bool = False,
    for_tensorrt: bool = False,
) -> dict[str, float]:
    """Write the graph of the file `fp32` with Q/DQ nodes to `place`, calibrated with `samples`.

    What is made of masks and ids alone stays as it is, see `_of_whole_numbers`.

    operators: the only ones that are computed in int8, where they have constant weights, with outputs in
    fp32; none: all that ONNX Runtime has. Of these, nodes whose inputs would keep fewer than LEAST_BITS stay
    fp32, and are returned with the bits that they would keep.
    batch: the only one that the graph takes. reduce_range: weights of 7 bits, which a CPU needs whose uint8 x
    int8 products saturate in 16 bits. fold: have ONNX Runtime fold constants and batch norms first;
    our own exporter has done so.
    """
    # By path: given a graph, the quantizer moves its weights into a file of its own and leaves it hollow.
    prepared, ranges = place.with_suffix(".prepared.onnx"), place.with_suffix(".ranges.json")

    def quantize(excluded: Sequence[str]) -> None:
        quantize_static(
            prepared,
            place,
            _Batches(samples, batch),
            calibration_cache_path=ranges,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_TENSORRT_OPS if for_tensorrt else list(operators) or None,
            per_channel=spec.weights == "int8-per-channel",
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8 if activations == "uint8" else QuantType.QInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=[*excluded],
            calibrate_method=CalibrationMethod.Percentile
            if spec.calibration == "percentile"
            else CalibrationMethod.MinMax,
            extra_options=dict(_TENSORRT_OPTIONS)
            if for_tensorrt
            else {
                "CalibTensorRangeSymmetric": False,
                "OpTypesToExcludeOutputQuantization": list(operators),
            },
        )

    coarse: dict[str, float] = {}
    with quiet():
        quant_pre_process(fp32, prepared, skip_optimization=not fold, skip_symbolic_shape=True)
        if operators:
            _transpose_constants(prepared)
        unfit = _without_constant(prepared) if operators else _of_whole_numbers(prepared, samples)
        excluded = [*excluded_nodes, *unfit]
        quantize(excluded)
        if operators:
            kept = _bits_kept(prepared, place, operators, _Batches(samples, batch))
            coarse = {name: bits for name, bits in kept.items() if bits < LEAST_BITS and name not in excluded}
        if coarse:
            quantize([*excluded, *coarse])
    for file in (prepared, ranges):
        file.unlink()
    return coarse


def _bits_kept(fp32: Path, int8: Path, operators: Sequence[str], samples: _Batches) -> dict[str, float]:
    """The effective bits that the inputs of each layer of `fp32` keep in `int8`, by the name of its node."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(int8).graph.initializer}
    grids = {
        node.input[0]: [constants[name] for name in node.input[1:]]
        for node in onnx.load(int8).graph.node
        if node.op_type == "QuantizeLinear"
    }
    model = onnx.load(fp32)
    outputs = len(model.graph.output)
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in grids)
    watched = fp32.with_suffix(".watched.onnx")
    onnx.save(model, watched)
    session = OnnxSession(watched, device="cpu", threads=0)
    watched.unlink()
    noise = {name: np.zeros(2) for name in grids}  # of rows: the sum of their shares, and how many they are
    while (feeds := samples.get_next()) is not None:
        for name, x in zip(grids, session.run(feeds)[outputs:], strict=True):
            error = _rounded(x, *grids[name]) - x
            signal, lost = (np.square(each, dtype=np.float64).sum(axis=-1) for each in (x, error))
            shares = lost[signal > 0] / signal[signal > 0]
            noise[name] += (shares.sum(), shares.size)
    return {
        node.name: effective_bits(noise[node.input[0]][0] / max(noise[node.input[0]][1], 1))
        for node in model.graph.node
        if node.op_type in operators and node.input[0] in grids
    }


def _rounded(x: NDArray[np.float32], scale: NDArray[Any], zero_point: NDArray[Any]) -> NDArray[np.float32]:
    """`x` after QuantizeLinear and DequantizeLinear."""
    limits, zero = np.iinfo(zero_point.dtype), float(zero_point)
    rounded: NDArray[np.float32] = (np.clip(np.rint(x / scale) + zero, limits.min, limits.max) - zero) * scale
    return rounded


def _transpose_constants(file: Path) -> None:
    """Put transposed weights in the place of weights and what transposes them, such as those of a tied head.

    The quantizer finds constant weights only where a layer takes them as they are.
    """
    model = onnx.load(file)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in [*model.graph.node]:
        if node.op_type == "Transpose" and node.input[0] in constants:
            axes = next((list(one.ints) for one in node.attribute if one.name == "perm"), None)
            weights = numpy_helper.to_array(constants[node.input[0]]).transpose(axes)
            named = f"{node.input[0]}_transposed"
            model.graph.initializer.append(numpy_helper.from_array(weights, named))
            model.graph.node.remove(node)
            for user in model.graph.node:
                user.input[:] = [named if name == node.output[0] else name for name in user.input]
    onnx.save(model, file)


def _without_constant(file: Path) -> list[str]:
    """The names of the nodes that have no weights, such as the products of attention."""
    graph = onnx.load(file).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if not constants & set(node.input)]


def _of_whole_numbers(file: Path, samples: Feeds) -> list[str]:
    """The nodes that compute with inputs of whole numbers, such as masks, ids and positions, before a layer.

    A scale of 8 bits spoils them: of scores to which a mask adds 0 or -1e38 it leaves nothing. Nodes without
    names get one.
    """
    model = onnx.load(file)
    constants = {tensor.name for tensor in model.graph.initializer}
    whole = {name for name, x in samples.items() if x.dtype.kind != "f" or np.array_equal(x, np.rint(x))}
    found = []
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
        taken = set(node.input) - constants - {""}
        if not taken:
            constants |= set(node.output)
        is_table = node.op_type == "Gather" and node.input[0] in constants
        if is_table or node.op_type in {*_LAYERS, "Shape"} or not taken & whole:
            continue
        found.append(node.name)
        is_masked = node.op_type in ("Add", "Sub", "Where")
        if node.op_type not in _BOUNDED and (is_masked or taken <= whole):
            whole |= set(node.output)
    onnx.save(model, file)
    return found


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
