"""Bundles to deploy: small ones, whose engines say that they are bound to this or that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from hpml.artifacts.operation import Operation, TensorSpec
from tests.pipelines.delivery.releases import with_manifest
from tests.serving.small_bundles import seal, write_bundle

PLAN = {
    "target": {"target": "tensorrt", "optimal_batch": 8, "max_batch": 32},
    "identity": {
        "runtime": "tensorrt 11.1.0.12",
        "device": "cuda NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "driver": "580.95.05",
    },
    "precision": "fp16",
}


def bundle_of(folder: Path, engine: dict[str, Any] | None = None, **facts: Any) -> Path:
    """A bundle of version 3; engine: what its engine says otherwise."""
    write_bundle(folder, version=3, **facts)
    told = json.loads((folder / "bundle.json").read_text())
    told["engine"] |= engine or {}
    seal(folder, {name: value for name, value in told.items() if name != "files"})
    return with_manifest(folder)


def _operation(name: str, graph: str, *, free: str) -> tuple[Operation, dict[str, np.ndarray]]:
    """It adds 1 to tokens, a free number of them in a row."""
    tensors = [TensorSpec(name=one, dtype="int64", shape=("batch", free)) for one in ("ids", f"next_{graph}")]
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    operation = Operation(name=name, graph=graph, inputs=(tensors[0],), outputs=(tensors[1],))
    return operation, {"ids": ids, f"next_{graph}": ids + 1}


def _adding(graph: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Add", ["ids", "one"], [f"next_{graph}"]),
    ]
    shape = ["batch", "length"]
    made = helper.make_graph(
        nodes,
        graph,
        [helper.make_tensor_value_info("ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info(f"next_{graph}", TensorProto.INT64, shape)],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def bundle_of_two_graphs(folder: Path) -> Path:
    """Two operations that share a graph, and one that has another."""
    operations, golden = [], {}
    for name, graph in (("prefill", "model"), ("decode", "model"), ("embed", "embed")):
        operation, arrays = _operation(name, graph, free="length")
        operations.append(operation)
        golden |= arrays
    task = {"task": "somebody.elses:Task"}
    write_bundle(folder, _adding("model"), task=task, operations=operations, golden=golden, version=3)
    onnx.save(_adding("embed"), folder / "engine" / "embed.onnx")
    told = json.loads((folder / "bundle.json").read_text())
    told["engine"]["graphs"] = {"model": "model.onnx", "embed": "embed.onnx"}
    seal(folder, {name: value for name, value in told.items() if name != "files"})
    return folder
