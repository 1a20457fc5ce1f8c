"""FLOPs and bytes of what has no pictures: attention, embeddings, recurrent layers, graphs inside nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hpml.components.diagnose import onnx_counts
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Layer, Profile
from hpml.components.diagnose.onnx_counts import Node, Shape
from hpml.components.diagnose.profilers import onnx_profile
from hpml.targets.onnx_session import single_requests
from tests.small_subjects import transformer_samples, write_endless, write_transformer

QUICK = DiagnoseConfig(requests=10, seconds=0.1)
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def profiled(file: Path, arrays: Mapping[str, Any]) -> Profile:
    return onnx_profile.profile(file, single_requests(arrays), threads=1, config=QUICK, scratch=file.parent)


def of_op(profile: Profile, op: str) -> Layer:
    return next(layer for layer in profile.layers if layer.op == op)


def saved(
    file: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[Any]]],
    weights: Mapping[str, Any],
    *,
    opset: int = 20,
) -> Path:
    """A graph whose output is y."""
    graph = helper.make_graph(
        nodes,
        "of transformers",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), file)
    return file


def test_a_transformer_of_ids_and_masks(tmp_path: Path) -> None:
    """Of 20,000 embeddings the 7 of the sample are read, not all."""
    file = write_transformer(tmp_path / "t.onnx", vocabulary=20_000)
    profile = profiled(file, transformer_samples(seq=7))
    looked_up = [layer for layer in profile.layers if layer.op == "Gather"]
    assert {layer.weight_bytes for layer in looked_up} == {7 * 8 * 4}
    assert {layer.activation_bytes for layer in looked_up} == {7 * 8 * 4 + 7 * 8}  # the ids are 8 bytes each
    products = sum(layer.flops for layer in profile.layers if "MatMul" in layer.op)
    assert products == 2 * 7 * 8 * 24 + 2 * 7 * 7 * 8 * 2 + 2 * 8 * 3
    assert not profile.notes or all("too short" in note for note in profile.notes)


@pytest.mark.parametrize("layout", ["3 dimensions", "4 dimensions"])
def test_attention_of_onnx_itself(tmp_path: Path, layout: str) -> None:
    """5 queries of 4 heads of 8 numbers, 9 keys; in place of weights it has keys."""
    queries, keys = ([5, 32], [9, 32]) if layout == "3 dimensions" else ([4, 5, 8], [4, 9, 8])
    heads = {"q_num_heads": 4, "kv_num_heads": 4} if layout == "3 dimensions" else {}
    file = saved(
        tmp_path / "a.onnx",
        [helper.make_node("Attention", ["q", "k", "v"], ["y"], **heads)],
        {"q": (FLOAT, ["n", *queries]), "k": (FLOAT, ["n", *keys]), "v": (FLOAT, ["n", *keys])},
        {},
        opset=23,
    )
    shapes = {"q": queries, "k": keys, "v": keys}
    layer = of_op(
        profiled(file, {name: np.ones((2, *shape), np.float32) for name, shape in shapes.items()}),
        "Attention",
    )
    assert layer.flops == 2 * 2 * 5 * 9 * 32 and layer.weight_bytes == 0
    assert layer.activation_bytes == 4 * 32 * (5 + 9 + 9 + 5)  # all three inputs come from outside


def test_a_recurrent_layer(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "l.onnx",
        [
            helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
            helper.make_node("LSTM", ["steps", "w", "r"], ["y"], hidden_size=6, direction="bidirectional"),
        ],
        {"x": (FLOAT, ["n", 11, 5])},
        {"w": np.ones((2, 24, 5), np.float32), "r": np.ones((2, 24, 6), np.float32)},
    )
    layer = of_op(profiled(file, {"x": np.ones((2, 11, 5), np.float32)}), "LSTM")
    assert layer.flops == 2 * 11 * 2 * 24 * (5 + 6)


def test_a_graph_inside_a_node_is_not_counted_and_said(tmp_path: Path) -> None:
    model = onnx.load(write_endless(tmp_path / "loop.onnx"))
    model.graph.node[0].input[0] = "turns"
    model.graph.initializer.append(numpy_helper.from_array(np.array(3, np.int64), "turns"))
    onnx.save(model, tmp_path / "loop.onnx")
    profile = profiled(tmp_path / "loop.onnx", {"x": np.ones((2, 4), np.float32)})
    assert of_op(profile, "Loop").flops == 0
    assert any("(Loop): what the graph in it computes is not counted" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("op", "attributes", "inputs", "outputs", "weights", "flops"),
    [
        ("Einsum", {"equation": b"bhqd,bhkd->bhqk"}, ((1, 2, 5, 8), (1, 2, 9, 8)), ((1, 2, 5, 9),), (), 1440),
        ("Einsum", {"equation": "ij , jk"}, ((3, 4), (4, 5)), ((3, 5),), (), 2 * 3 * 5 * 4),
        ("Einsum", {"equation": "...ij,...jk->...ik"}, ((7, 3, 4), (7, 4, 5)), ((7, 3, 5),), (), 840),
        ("MatMulNBits", {"K": 64, "N": 16}, ((1, 3, 64), (16, 2, 16)), ((1, 3, 16),), (16, 2, 16), 6144),
        # with its projections: x (1, 5, 8), weights (8, 24), scores and values over 5 keys
        ("Attention", {}, ((1, 5, 8), (8, 24)), ((1, 5, 8),), (8, 24), 2 * 5 * 8 * 24 + 4 * 5 * 5 * 8),
        # one token after 20 others: the keys of before count
        (
            "GroupQueryAttention",
            {},
            ((1, 1, 32), (1, 1, 8), (1, 1, 8), (1, 1, 20, 8)),
            ((1, 1, 32), (1, 1, 21, 8)),
            (),
            2 * 2 * 21 * 32,
        ),
        ("Where", {}, ((5, 5), (5, 5), (1,)), ((5, 5),), (), 0),
        ("Gelu", {}, ((5, 5),), ((5, 5),), (), 125),
    ],
)
def test_operations_by_hand(
    op: str,
    attributes: dict[str, Any],
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    weights: Shape,
    flops: int,
) -> None:
    assert onnx_counts.flops(Node(op, attributes, inputs, outputs, weights)) == flops


def test_attention_has_weights_only_in_the_domain_of_onnx_runtime() -> None:
    packed = helper.make_node("Attention", ["x", "w"], ["y"], domain="com.microsoft")
    assert onnx_counts.weights_of(packed) == "w"
    assert onnx_counts.weights_of(helper.make_node("Attention", ["q", "k", "v"], ["y"])) == ""
