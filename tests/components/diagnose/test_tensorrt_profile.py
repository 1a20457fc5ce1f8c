"""Layers of TensorRT plans: what its profiler and inspector tell, by hand, and for real where a GPU is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.diagnose import onnx_nodes
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Channels, Layer, Profile
from hpml.components.diagnose.onnx_nodes import Feeds, GraphNode
from hpml.components.diagnose.profilers import tensorrt_profile
from hpml.core.errors import StageFailed
from hpml.targets import TensorRT
from hpml.targets.onnx_graph import export_graph, save_graph, to_fp16
from hpml.targets.onnx_session import single_requests
from hpml.targets.tensorrt import GRAPH, without_weights
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of
from tests.components.diagnose import tensorrt_by_hand as by_hand
from tests.components.diagnose.conftest import Diagnose, MakeEngine, make_gpu_peaks, request_of

GPU = "cuda NVIDIA H200"


@pytest.fixture(scope="module")
def plan(make_engine: MakeEngine) -> Artifact[EngineSpec]:
    """The engine that `by_hand` tells of."""
    return make_engine(
        by_hand.network(), activations="int8", in_fp32=["head"], target="tensorrt", identity={"device": GPU}
    )


@pytest.fixture(scope="module")
def nodes(plan: Artifact[EngineSpec]) -> dict[str, GraphNode]:
    return onnx_nodes.read(plan.path / GRAPH, request_of(plan))


def by_name(profile: Profile) -> dict[str, Layer]:
    return {layer.name: layer for layer in profile.layers}


# ------------------------------------------------------------------------------------------ nodes of a graph


def test_nodes_are_counted_by_hand(nodes: dict[str, GraphNode]) -> None:
    assert nodes["conv2"] == GraphNode(
        "Conv", 2 * 32 * 32 * 32 * 32 * 9, weights=32 * 32 * 9, layer="conv2", channels=Channels(32, 32)
    )
    assert nodes["head"] == GraphNode("Gemm", 2 * 32 * 10, 320, "head", channels=Channels(32, 10))
    assert nodes["relu1"] == GraphNode("Relu", 32 * 32 * 32)
    assert nodes["flat"].flops == nodes["conv2.weight_QuantizeLinear"].flops == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_graph_without_its_weights_says_the_same_of_its_nodes(
    small_model: Artifact[ModelSpec], precision: str, tmp_path: Path
) -> None:
    from hpml import models

    request = {"x_nchw": np.zeros((1, 1, 8, 8), np.float32)}
    whole, outline = tmp_path / "whole.onnx", tmp_path / "outline.onnx"
    save_graph(export_graph(models.load(small_model), small_model.spec.operations[0], opset=20), whole)
    if precision == "fp16":
        save_graph(to_fp16(onnx.load(whole)), whole)
    save_graph(without_weights(onnx.load(whole)), outline)
    assert outline.stat().st_size < 0.1 * whole.stat().st_size
    found = onnx_nodes.read(outline, request)
    assert found == onnx_nodes.read(whole, request)
    products = [node for node in found.values() if node.is_product]
    assert sum(node.flops or 0 for node in products) == 2 * small_model.spec.macs
    assert all(node.layer and node.weights for node in products)


def test_a_node_whose_shape_cannot_be_inferred_is_told_from_one_without_arithmetic(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x_nchw", "y")]
    graph = helper.make_graph(
        [
            helper.make_node("Theirs", ["x_nchw"], ["t"], name="theirs", domain="their.own"),
            helper.make_node("Relu", ["t"], ["u"], name="after"),
            helper.make_node("Identity", ["x_nchw"], ["y"], name="same"),
        ],
        "graph",
        ends[:1],
        ends[1:],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("their.own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "graph.onnx")
    found = onnx_nodes.read(tmp_path / "graph.onnx", {"x_nchw": np.zeros((1, 4), np.float32)})
    assert {name: node.flops for name, node in found.items()} == {"theirs": None, "after": None, "same": 0}
    profile = tensorrt_profile.layers_of([], json.dumps({"Layers": []}), found)
    assert profile.notes == ("operations without known shapes are not counted (2): theirs, after",)


# ------------------------------------------------------------------------------------------- layers of a plan


@pytest.mark.parametrize("version", [10, 11])
def test_layers_of_a_plan(version: by_hand.Version, nodes: dict[str, GraphNode]) -> None:
    profile = tensorrt_profile.layers_of(by_hand.inferences(), by_hand.inspected(version), nodes)
    assert profile.notes == ()
    assert [layer.op for layer in profile.layers] == [
        "Reformat",
        "CaskConvolution",
        "CaskConvolution",
        "Reformat",
        "CaskConvolution",
        "kgen",
        "gemm",
    ]
    layers = by_name(profile)
    quantize, conv0, conv4 = layers["x_nchw_QuantizeLinear"], layers["conv0"], layers["conv4"]
    assert (quantize.role, quantize.flops, quantize.precision) == ("conversion", 0, "int8")
    assert quantize.activation_bytes == 3 * 32 * 32 * (4 + 1)

    features = 32 * 32 * 32
    assert conv0.precision == "int8" and conv0.role == ""
    assert conv0.flops == 2 * features * 3 * 9 + features  # and a rectifier
    assert (conv0.weight_bytes, conv0.activation_bytes) == (32 * 3 * 9, 3 * 32 * 32 + features)
    assert conv0.channels[:2] == (3, 32)
    assert conv0.nodes == ("conv0.weight_QuantizeLinear", "conv0", "relu1")
    assert "Int8" in conv0.formats and conv0.kernel.startswith("sm80_xmma_fprop_implicit_gemm")

    # what comes in is int8, what goes out fp32; the shape tensor is on the host
    assert (conv4.precision, conv4.activation_bytes) == ("int8", features + features + 4 * features)
    assert conv4.flops == 2 * features * 32 * 9 + features + features  # and a sum, and a rectifier
    copy = next(layer for layer in profile.layers if layer.name.startswith("Reformatting CopyNode"))
    assert (copy.role, copy.flops) == ("layout", 0)  # it names conv4 and does none of its arithmetic
    assert (layers["head"].precision, layers["head"].weight_bytes) == ("fp32", 4 * 320)
    assert layers["__myl_Mean_myl0_0"].flops == features
    assert sum(layer.flops for layer in profile.layers) == sum(node.flops or 0 for node in nodes.values())


def test_a_disturbed_inference_does_not_change_the_times(nodes: dict[str, GraphNode]) -> None:
    """A quarter takes three times as long; a layer that takes no time is none."""
    profile = tensorrt_profile.layers_of(by_hand.inferences(), by_hand.inspected(), nodes)
    assert [layer.time_us for layer in profile.layers] == pytest.approx(by_hand.TIMES_US[:-1])


def test_layers_of_the_same_name_are_told_apart_by_their_turn() -> None:
    entry = {"Name": "copy", "LayerType": "Reformat", "Metadata": ""}
    inspected = json.dumps({"Layers": [{**entry, "TacticName": "first"}, {**entry, "TacticName": "second"}]})
    reports = [[("copy", 0.001), ("copy", 0.002)]] * 3
    layers = tensorrt_profile.layers_of(reports, inspected, {}).layers
    assert [(layer.kernel, layer.time_us) for layer in layers] == [
        ("first", pytest.approx(1.0)),
        ("second", pytest.approx(2.0)),
    ]


def test_a_product_counts_in_the_layer_that_multiplies_however_short_it_is() -> None:
    """A second compiler's layer may name a product whose input it only brings in place."""
    tensor = {"Name": "t", "Dimensions": [1, 64], "Format/Datatype": "Half"}
    entry = {
        "Inputs": [tensor],
        "Outputs": [tensor],
        "Metadata": "[ONNX Layer: fc/a[0]]\x1f[ONNX Layer: act]",
    }
    inspected = json.dumps(
        {
            "Layers": [
                {**entry, "Name": "__myl_Move_myl0_0", "LayerType": "kgen", "TacticName": "__myl_Move"},
                {**entry, "Name": "__myl_Fc_myl0_1", "LayerType": "fusion", "TacticName": "sm80_xmma_gemm"},
            ]
        }
    )
    nodes = {"fc/a[0]": GraphNode("MatMul", 8192, 4096, "fc"), "act": GraphNode("Relu", 64)}
    reports = [[("__myl_Move_myl0_0", 0.02), ("__myl_Fc_myl0_1", 0.01)]] * 3
    move, product = tensorrt_profile.layers_of(reports, inspected, nodes).layers
    assert (product.name, product.flops, product.precision, product.weight_bytes) == (
        "fc",
        8192,
        "fp16",
        8192,
    )
    assert (move.name, move.flops) == ("__myl_Move_myl0_0", 64)  # what is no product counts in the slowest


def test_what_could_not_be_counted_is_said(nodes: dict[str, GraphNode]) -> None:
    told = json.loads(by_hand.inspected(), strict=False)
    del told["Layers"][4]  # conv4 and what is fused into it
    told["Layers"][1]["Inputs"][0]["Format/Datatype"] = "N/A due to dynamic shapes"
    profile = tensorrt_profile.layers_of(by_hand.inferences(), json.dumps(told), nodes)
    first, second, third = profile.notes
    assert first.startswith("TensorRT timed layers of which its inspector tells nothing (1): conv4.weight + ")
    assert second == "tensors of unknown types count 4 bytes an element (1): x_nchw_QuantizeLinear_Output"
    assert third == "48 % of the operations are in nodes that no timed layer names"
    (lost,) = (layer for layer in profile.layers if layer.op == "unknown")
    assert (lost.time_us, lost.flops, lost.bytes) == (pytest.approx(30.0), 0, 0)
    assert lost.formats == ""


def test_a_plan_that_tells_names_only_is_refused() -> None:
    with pytest.raises(StageFailed, match="profiling verbosity") as failure:
        tensorrt_profile.engine_layers(json.dumps({"Layers": ["conv0 + relu1", "head"]}))
    assert "export it again" in str(failure.value)


# -------------------------------------------------------------------------------------------------- the stage


class HandWritten:
    """In place of a plan's session: the machine that runs this has no GPU."""

    def __init__(self) -> None:
        self.rows = 0

    def run(self, feeds: Feeds, operation: str = "predict") -> dict[str, np.ndarray]:
        return {"logits": np.zeros((len(feeds["x_nchw"]), 10), np.float32)}

    def profiled(self, requests: Sequence[Feeds], *, count: int) -> tuple[Any, str]:
        self.rows = len(requests)
        first = [[(name, 100 * ms) for name, ms in reports] for reports in by_hand.inferences(count=10)]
        return first + by_hand.inferences(count=count - 10), by_hand.inspected()


def test_the_stage_puts_a_plan_under_the_peaks_of_the_gpu(
    plan: Artifact[EngineSpec],
    make_engine: MakeEngine,
    run_diagnosis: Diagnose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = HandWritten()
    monkeypatch.setattr(TensorRT, "load", lambda *_, **__: session)
    clock = SimpleNamespace(perf_counter=itertools.count(step=1e-3).__next__)  # the warm-up takes 1 ms
    monkeypatch.setattr(tensorrt_profile, "time", clock)
    engines = {"int8/tensorrt": plan, "fp32/onnx": make_engine(by_hand.network())}
    spec = run_diagnosis(engines, peaks=make_gpu_peaks(), time_us={"int8/tensorrt": 250.0})
    one, other = spec.engines["int8/tensorrt"], spec.engines["fp32/onnx"]
    assert (one.status, one.device, other.device) == ("diagnosed", "cuda", "cpu")
    assert one.profiled_us == pytest.approx(sum(by_hand.TIMES_US))  # without the warm-up
    assert session.rows == 8
    conv2 = next(layer for layer in one.layers if layer.name == "conv2")
    at_peak_us = max(conv2.flops / 200e6, conv2.bytes / 2e6)
    assert conv2.share_of_roof == pytest.approx(at_peak_us / 20.0, abs=1e-4)
    assert conv2.kernel and conv2.nodes and conv2.formats
    assert any("not of its caches" in note for note in spec.notes)
    assert one.verdict.startswith("dispatch-bound: ")
    (cpu_layer, *_) = other.layers
    assert (cpu_layer.kernel, cpu_layer.nodes) == ("", ())


def test_an_engine_without_its_graph_is_not_diagnosed(
    make_engine: MakeEngine, run_diagnosis: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorRT, "load", lambda *_, **__: HandWritten())
    engine = make_engine(by_hand.network(), target="tensorrt", identity={"device": GPU}, with_graph=False)
    one = run_diagnosis({"old/tensorrt": engine}, time_us={"old/tensorrt": 250.0}).engines["old/tensorrt"]
    assert (one.status, one.reason) == ("not diagnosed", f"it holds no {GRAPH}; export it again")


# ------------------------------------------------------------------------------------------- where a GPU is


@pytest.mark.skipif(bool(TensorRT().missing()), reason=f"needs TensorRT: {TensorRT().missing()}")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_real_plan(
    small_model: Artifact[ModelSpec], digits_data: Artifact[DatasetSpec], run_stage: Any, precision: Any
) -> None:
    from hpml.components.export import stage as export

    config = TensorRT(float_precision=precision, max_batch=8)
    engine = run_stage(export.run, config, model=small_model, data=digits_data)
    task = task_of(small_model.spec.task)
    feeds = task.features(rows_of(task.stored(digits_data, "validation"), slice(4)))
    session: Any = config.load(engine.path, engine.spec, threads=1)
    before = session.run(feeds)["logits"]
    profile = tensorrt_profile.profile(
        session, engine.path / GRAPH, single_requests(feeds), config=DiagnoseConfig(requests=20)
    )
    np.testing.assert_allclose(session.run(feeds)["logits"], before, atol=1e-6)
    assert profile.notes == ()
    assert all(layer.time_us > 0 and layer.formats for layer in profile.layers)
    products = [layer for layer in profile.layers if layer.channels.outputs]
    assert sum(layer.flops for layer in products) >= 2 * small_model.spec.macs
    assert {layer.precision for layer in products} == {precision}
