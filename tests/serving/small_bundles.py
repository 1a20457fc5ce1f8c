"""Bundles made by hand around small graphs: one that is served, and all that must not be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from hpml.artifacts.operation import DATATYPES, Operation, TensorSpec

CLASSES = 3
WEIGHTS = np.random.default_rng(0).standard_normal((16, CLASSES)).astype(np.float32)
OPERATION = Operation(
    inputs=(TensorSpec(name="x_nchw", shape=("batch", 1, 4, 4)),),
    outputs=(TensorSpec(name="logits", shape=("batch", CLASSES)),),
)
PICTURES = {
    "task": "image_classification",
    "class_names": ["a", "b", "c"],
    "image_shape_hwc": [4, 4, 1],
    "mean": [0.5],
    "std": [0.25],
}


def graph(weights: np.ndarray = WEIGHTS, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Flatten, then one layer; `nodes` stand before."""
    made = helper.make_graph(
        [
            *nodes,
            helper.make_node("Flatten", ["x_nchw"], ["x"]),
            helper.make_node("MatMul", ["x", "weights"], ["logits"]),
        ],
        "small",
        [helper.make_tensor_value_info("x_nchw", TensorProto.FLOAT, ["batch", 1, 4, 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(weights, "weights")],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def logits(x_nchw: np.ndarray, weights: np.ndarray = WEIGHTS) -> np.ndarray:
    """What the graph gives."""
    flat: np.ndarray = x_nchw.reshape(len(x_nchw), -1) @ weights
    return flat


def write_bundle(
    folder: Path,
    model: onnx.ModelProto | None = None,
    *,
    task: dict[str, Any] = PICTURES,
    operations: Sequence[Operation] = (OPERATION,),
    golden: dict[str, np.ndarray] | None = None,
    version: int = 1,
    **facts: Any,
) -> Path:
    """A bundle whose digests are right, whatever its graph is."""
    engine = folder / "engine"
    engine.mkdir(parents=True)
    onnx.save(model or graph(), engine / "model.onnx")
    if golden is None:
        x_nchw = np.random.default_rng(1).standard_normal((4, 1, 4, 4)).astype(np.float32)
        golden = {"x_nchw": x_nchw, "logits": logits(x_nchw)}
    for name, array in golden.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "preprocessing.json").write_text("{}")
    told = {
        "format": 2,
        "model_name": "small",
        "model_version": version,
        "engine_digest": f"digest-{version}",
        "engine": {
            "target": {"target": "onnx"},
            "status": "built",
            "file": "model.onnx",
            "precision": "fp32",
            "methods": [],
            "task": task,
            "operations": [one.model_dump(mode="json") for one in operations],
            "identity": {"device": "cpu", "runtime": f"onnxruntime {onnxruntime.__version__}"},
        },
        "file": "engine/model.onnx",
        "settings": {"threads": 1, "spinning": False},
        "operations": [
            {
                "name": one.name,
                "golden": {tensor.name: f"{tensor.name}.npy" for tensor in (*one.inputs, *one.outputs)},
                "tolerance": {tensor.name: 1e-4 for tensor in one.outputs},
            }
            for one in operations
        ],
        **facts,
    }
    seal(folder, told)
    return folder


def seal(folder: Path, told: dict[str, Any]) -> None:
    """Write bundle.json with the digests of what is there."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "bundle.json"]
    digests = {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    (folder / "bundle.json").write_text(json.dumps({**told, "files": digests}))


def as_request(x_nchw: np.ndarray, *, binary: bool = False) -> tuple[bytes, dict[str, str]]:
    """The body of an inference and its headers, by the protocol."""
    told: dict[str, Any] = {"name": "x_nchw", "datatype": DATATYPES[str(x_nchw.dtype)], "shape": x_nchw.shape}
    if not binary:
        return json.dumps({"inputs": [told | {"data": x_nchw.tolist()}]}).encode(), {}
    told["parameters"] = {"binary_data_size": x_nchw.nbytes}
    head = json.dumps({"inputs": [told], "parameters": {"binary_data_output": True}}).encode()
    return head + x_nchw.tobytes(), {"Inference-Header-Content-Length": str(len(head))}
