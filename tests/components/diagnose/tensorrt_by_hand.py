"""What TensorRT would tell of an int8 plan of a small network, written by hand: there is no GPU here.

The fields, the words for formats, and the separators in the metadata are those of NVIDIA's documentation and
of the engines that it publishes with its engine explorer. TensorRT 11 splits a field and names the inputs and
outputs of the plan otherwise, so there are both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from tests.components.diagnose.conftest import Network

Version = Literal[10, 11]

_LAYOUTS = {
    "FP32": "Row major linear FP32",
    "INT8/4": "Four wide channel vectorized row major Int8 format",
    "INT8/32": "Thirty-two wide channel vectorized row major Int8 format",
    "FP32/32": "Thirty-two wide channel vectorized row major FP32 format",
    "Float": "Float",  # of the layers that TensorRT's second compiler made
}
_TYPES = {"FP32": "Float", "INT8/4": "Int8", "INT8/32": "Int8", "FP32/32": "Float", "Float": "Float"}


def network() -> Network:
    """Nodes conv0 relu1 | conv2 relu3 | conv4 sum5 relu6 | pool flat head."""
    return Network((3, 32, 32)).conv(32).residual().head(10)


def inspected(version: Version = 10) -> str:
    """The inspector's JSON on the plan of `network` in int8, its head left in fp32."""
    image, features = (-1, 3, 32, 32), (-1, 32, 32, 32)

    def tensor(name: str, shape: Sequence[int], kind: str, **more: str) -> dict[str, Any]:
        described = {"Name": name, "Location": "Device", "Dimensions": list(shape), **more}
        if version == 10:
            return {**described, "Format/Datatype": _LAYOUTS[kind]}
        return {**described, "Format": _LAYOUTS[kind], "Datatype": _TYPES[kind]}

    def layer(
        name: str,
        type_: str,
        fed: Sequence[Any],
        given: Any,
        nodes: Sequence[str],
        tactic: str = "",
        **more: Any,
    ) -> dict[str, Any]:
        metadata = ("\x1f" if version == 10 else "\x1e").join(f"[ONNX Layer: {node}]" for node in nodes)
        return {
            "Name": name,
            "LayerType": type_,
            "Inputs": list(fed),
            "Outputs": [given],
            **more,
            "TacticName": tactic,
            "TacticValue": "0x00000000000003e8",
            "StreamId": 0,
            "Metadata": metadata,
        }

    x = tensor("x_nchw", image, "FP32")
    x_int8 = tensor("x_nchw_QuantizeLinear_Output", image, "INT8/4")
    a, b = (tensor(f"{name}_QuantizeLinear_Output", features, "INT8/32") for name in ("relu1", "relu3"))
    skipped = tensor("Reformatted Input Tensor 1 to conv4", features, "INT8/32")
    c = tensor("relu6", features, "FP32/32")
    pooled = tensor("pool", (-1, 32, 1, 1), "Float")
    convolution = {"ParameterType": "Convolution", "Kernel": [3, 3], "OutMaps": 32, "Groups": 1}
    int8_kernel = "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32"
    layers = [
        layer("x_nchw_QuantizeLinear", "Reformat", [x], x_int8, ["x_nchw_QuantizeLinear"], Origin="QDQ"),
        layer(
            "conv0.weight + conv0.weight_QuantizeLinear + conv0 + relu1",
            "CaskConvolution",
            [x_int8],
            a,
            ["conv0.weight_QuantizeLinear", "conv0", "relu1"],
            int8_kernel,
            **convolution,
        ),
        layer(
            "conv2.weight + conv2.weight_QuantizeLinear + conv2 + relu3",
            "CaskConvolution",
            [a],
            b,
            ["conv2.weight_QuantizeLinear", "conv2", "relu3"],
            int8_kernel,
            **convolution,
        ),
        layer(
            "Reformatting CopyNode for Input Tensor 1 to conv4.weight + conv4 + sum5 + relu6",
            "Reformat",
            [a],
            skipped,
            ["conv4", "sum5", "relu6"],
            Origin="REFORMAT",
        ),
        layer(
            "conv4.weight + conv4.weight_QuantizeLinear + conv4 + sum5 + relu6",
            "CaskConvolution",
            [b, skipped, tensor("shape", (4,), "FP32", Location="Host")],
            c,
            ["conv4.weight_QuantizeLinear", "conv4", "sum5", "relu6"],
            int8_kernel,
            **convolution,
        ),
        layer("__myl_Mean_myl0_0", "kgen", [c], pooled, ["pool", "flat"], "__myl_Mean_0x6bb1"),
        layer(
            "head_myl0_1",
            "gemm",
            [pooled],
            tensor("logits", (-1, 10), "Float"),
            ["head"],
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8",
        ),
        layer("logits copy", "NoOp", [pooled], pooled, []),
    ]
    ends = (
        {"Bindings": ["x_nchw", "logits"]}
        if version == 10
        else {"I/O Tensors": [{"Name": "x_nchw", "IOMode": "Input", "DataType": "Float"}]}
    )
    # TensorRT writes its separators as they are, which strict JSON forbids.
    text = json.dumps({"Layers": layers, **ends})
    return text.replace("\\u001f", "\x1f").replace("\\u001e", "\x1e")


TIMES_US = (6.0, 9.0, 20.0, 5.0, 30.0, 12.0, 8.0, 0.0)  # of the layers of `inspected`


def inferences(times_us: Sequence[float] = TIMES_US, *, count: int = 20) -> list[list[tuple[str, float]]]:
    """What the profiler would report: every fourth inference is disturbed and takes 3 times as long."""
    names = [layer["Name"] for layer in json.loads(inspected(), strict=False)["Layers"]]
    return [
        [
            (name, (3.0 if index % 4 == 0 else 1.0) * time_us / 1e3)
            for name, time_us in zip(names, times_us, strict=True)
        ]
        for index in range(count)
    ]
