"""How fast square matrix products run through ONNX Runtime: MLAS, in fp32 and in both kinds of int8.

The right factor is a constant of the model, as a layer's weights are, so that MLAS packs it beforehand. The
inputs and outputs are bound: nothing is copied. Threads sleep between products, as those of an engine do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from hpml.components.peaks.gemm import Product, Series
from hpml.targets.onnx_session import PROVIDERS, session_options

_LIBRARY = "onnxruntime (MLAS)"
_COMPATIBLE_VERSIONS = {"opset": 17, "ir": 9}


def onnx_series(threads: int) -> Iterator[Series]:
    """MatMul in fp32; MatMulInteger of unsigned and of signed activations with signed weights."""
    yield Series(
        "fp32", _LIBRARY, threads, lambda size: _product("MatMul", np.float32, np.float32, size, threads)
    )
    for name, left in (("U8S8", np.uint8), ("S8S8", np.int8)):
        yield Series(
            "int8",
            f"{_LIBRARY} {name}",
            threads,
            lambda size, left=left: _product("MatMulInteger", left, np.int8, size, threads),  # type: ignore[misc]
        )


def _product(operator: str, left: type, right: type, size: int, threads: int) -> Product:
    session = _session(operator, left, right, size, threads)
    answer = np.float32 if left is np.float32 else np.int32
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", onnxruntime.OrtValue.ortvalue_from_numpy(_matrix(left, size)))
    binding.bind_ortvalue_output(
        "c", onnxruntime.OrtValue.ortvalue_from_shape_and_type([size, size], answer, "cpu")
    )
    return lambda: session.run_with_iobinding(binding)


def _session(operator: str, left: type, right: type, size: int, threads: int) -> Any:
    """A session of c = a x b, with the options that engines have."""
    answer = np.float32 if left is np.float32 else np.int32
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["c"])],
        "gemm",
        [_described("a", left, size)],
        [_described("c", answer, size)],
        [numpy_helper.from_array(_matrix(right, size), "b")],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _COMPATIBLE_VERSIONS["opset"])],
        ir_version=_COMPATIBLE_VERSIONS["ir"],
    )
    options = session_options(threads, spinning=False)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS["cpu"])


def _described(name: str, kind: type, size: int) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [size, size])


def _matrix(kind: type, size: int) -> NDArray[Any]:
    """Reproducible entries; of integers 7 bits, whose products a CPU without VNNI does not saturate."""
    rng = np.random.default_rng(size)
    if kind is np.float32:
        return rng.standard_normal((size, size), np.float32)
    return rng.integers(0, 64, (size, size)).astype(kind)
