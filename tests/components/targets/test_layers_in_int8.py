"""int8 of layers alone, as tasks of text have it: what is rounded, and what is too coarse to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hpml.artifacts.model import QuantizationSpec
from hpml.targets.onnx_int8 import quantize_graph
from hpml.targets.onnx_session import OnnxSession

LAYERS = ("MatMul", "Gemm")
SPEC = QuantizationSpec(
    scheme="static",
    weights="int8-per-channel",
    activations="uint8",
    calibration="minmax",
    calibration_rows=(),
)
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.normal(size=(16, 8)).astype(np.float32)
EVEN = RANDOM.normal(size=(512, 16)).astype(np.float32)
SPIKY = EVEN.copy()
SPIKY[0, 0] = 300.0


def saved(place: Path, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], output: str) -> Path:
    """A graph of inputs (batch, 16) with the constant "weights"."""
    ends = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in {**dict.fromkeys(inputs, 16), output: 8}.items()
    }
    graph = helper.make_graph(
        nodes,
        "layers",
        [ends[name] for name in inputs],
        [ends[output]],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(np.float32(-1e4), "lowest")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), place)
    return place


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """One layer of each input; their outputs are added."""
    nodes = [
        helper.make_node("MatMul", ["even", "weights"], ["a"], name="of_even"),
        helper.make_node("MatMul", ["spiky", "weights"], ["b"], name="of_spiky"),
        helper.make_node("Add", ["a", "b"], ["sum"], name="sum"),
    ]
    return saved(tmp_path / "fp32.onnx", nodes, ("even", "spiky"), "sum")


@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("calibration", ["minmax", "percentile"])
def test_a_layer_whose_inputs_would_be_rounded_away_stays_fp32(
    two_layers: Path, tmp_path: Path, activations: str, calibration: str
) -> None:
    place = tmp_path / "int8.onnx"
    left = quantize_graph(
        two_layers,
        place,
        SPEC.model_copy(update={"calibration": calibration}),
        {"even": EVEN, "spiky": SPIKY},
        activations=activations,
        excluded_nodes=[],
        operators=LAYERS,
    )
    assert list(left) == ["of_spiky"] and 0 < left["of_spiky"] < 4
    rounded = [node.input[0] for node in onnx.load(place).graph.node if node.op_type == "QuantizeLinear"]
    assert rounded == ["even"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fp32.onnx", "int8.onnx"]


def test_what_is_excluded_anyway_is_not_told(two_layers: Path, tmp_path: Path) -> None:
    left = quantize_graph(
        two_layers,
        tmp_path / "int8.onnx",
        SPEC,
        {"even": EVEN, "spiky": SPIKY},
        activations="uint8",
        excluded_nodes=["of_spiky"],
        operators=LAYERS,
    )
    assert not left


def test_with_all_operators_in_int8_none_is_left_out(two_layers: Path, tmp_path: Path) -> None:
    samples = {"even": EVEN, "spiky": SPIKY}
    place = tmp_path / "int8.onnx"
    assert not quantize_graph(two_layers, place, SPEC, samples, activations="uint8", excluded_nodes=[])
    rounded = {node.input[0] for node in onnx.load(place).graph.node if node.op_type == "QuantizeLinear"}
    assert {"even", "spiky"} <= rounded


def test_a_mask_in_int8_takes_what_it_does_not_hide(tmp_path: Path) -> None:
    """Why tasks of text name the operators: 8 bits from -10,000 up are steps of 40, so scores become 0."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["scores"], name="layer"),
        helper.make_node("ReduceMax", ["least"], ["limit"], name="limit"),
        helper.make_node("Greater", ["scores", "limit"], ["shown"], name="shown"),
        helper.make_node("Where", ["shown", "scores", "lowest"], ["masked"], name="mask"),
        helper.make_node("Softmax", ["masked"], ["attention"], name="softmax"),
    ]
    fp32 = saved(tmp_path / "fp32.onnx", nodes, ("x", "least"), "attention")
    samples = {"x": EVEN, "least": np.full_like(EVEN, -2.0)}
    [expected] = OnnxSession(fp32, device="cpu", threads=1).run(samples)
    errors = {}
    for operators in (LAYERS, ()):
        place = tmp_path / "int8.onnx"
        quantize_graph(
            fp32, place, SPEC, samples, activations="uint8", excluded_nodes=[], operators=operators
        )
        [attention] = OnnxSession(place, device="cpu", threads=1).run(samples)
        errors[operators] = float(np.abs(attention - expected).max())
    assert errors[LAYERS] < 0.1 < 0.3 < errors[()]
