"""Layers of OpenVINO: the arithmetic is that of the graph, whatever the runtime made of its names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.components.diagnose import onnx_nodes
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.profilers import openvino_profile
from hpml.targets.onnx_session import single_requests
from hpml.targets.openvino import OpenVinoSession, RuntimeLayer
from tests.components.diagnose.conftest import MakeEngine, Network, request_of, shape_of

QUICK = DiagnoseConfig(requests=20, seconds=0.2)
Diagnose = Callable[..., DiagnosisSpec]


def network() -> Network:
    return Network((3, 16, 16)).conv(8).residual().conv(16, stride=2).head(2)


@pytest.mark.parametrize("activations", ["", "uint8", "int8"])
def test_every_operation_is_counted_once(make_engine: MakeEngine, activations: str) -> None:
    engine = make_engine(network(), activations=activations, target="openvino")
    file = engine.path / "model.onnx"
    session = OpenVinoSession(file, threads=1, float_precision="fp32")
    x_nchw = np.random.default_rng(0).standard_normal((4, *shape_of(engine)), np.float32)
    profile = openvino_profile.profile(session, file, single_requests({"x_nchw": x_nchw}), config=QUICK)
    products = [layer for layer in profile.layers if layer.channels.outputs]
    assert [layer.name for layer in products] == ["conv0", "conv2", "conv4", "conv7", "head"]
    # Of signed activations OpenVINO computes some layers in fp32, depending on the CPU.
    expected = {"": {"fp32"}, "uint8": {"int8"}, "int8": {"int8", "fp32"}}
    assert {layer.precision for layer in products} <= expected[activations]
    counted = sum(node.flops or 0 for node in onnx_nodes.read(file, request_of(engine)).values())
    in_layers = sum(layer.flops for layer in profile.layers)
    assert counted * 0.95 < in_layers <= counted  # int8: a ReLU that became a clipping is no operation
    assert sum(layer.time_us for layer in profile.layers) > 0


def test_times_are_those_of_the_middle_compilations(make_engine: MakeEngine) -> None:
    engine = make_engine(Network((3, 8, 8)).conv(4, relu=False), target="openvino")

    def told(time_us: float | None) -> list[RuntimeLayer]:
        image = RuntimeLayer(
            "x_nchw", "Input", "unknown", ("x_nchw",), "f32", "abcd", (-1, 3, 8, 8), (), None
        )
        conv = RuntimeLayer(
            "logits", "Convolution", "jit", ("logits",), "f32", "acdb", (-1, 4, 8, 8), ("x_nchw",), time_us
        )
        return [image, conv]

    compilations = [told(time_us) for time_us in (9.0, 7.0, 500.0, 8.0, 1.0)]
    file = engine.path / "model.onnx"
    [layer] = openvino_profile.layers_of(compilations, file, request_of(engine)).layers
    assert (layer.name, layer.time_us, layer.channels.outputs) == ("conv0", 8.0, 4)
    assert layer.activation_bytes == 4 * (3 + 4) * 8 * 8  # a batch of -1 is 1
    unseen = openvino_profile.layers_of([told(0.0)] * 5, file, request_of(engine))
    assert "too short for OpenVINO's profile" in unseen.notes[0]


def test_the_stage_diagnoses_it(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    engine = make_engine(network(), target="openvino")
    one = run_diagnosis({"fp32/openvino": engine}).engines["fp32/openvino"]
    assert (one.status, one.device) == ("diagnosed", "cpu")
    assert one.verdict and any(layer.kernel for layer in one.layers)


def test_an_engine_of_a_target_that_is_not_here_leaves_the_others_diagnosed(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    engines = {
        "fp32/tvm": make_engine(network(), target="tvm", identity={"device": "cpu of before"}),
        "fp32/openvino": make_engine(network(), target="openvino"),
    }
    spec = run_diagnosis(engines, time_us={"fp32/tvm": 500.0})
    assert spec.engines["fp32/openvino"].status == "diagnosed"
    unknown = spec.engines["fp32/tvm"]
    assert unknown.status == "not diagnosed" and "'tvm' is unknown, allowed: eager" in unknown.reason
