"""FLOPs, bytes and times of layers: of ONNX Runtime's own graph, and of torch eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Layer, Profile, requests_within, typical_us
from hpml.components.diagnose.profilers import onnx_profile
from hpml.core import errors
from hpml.core.errors import StageFailed
from hpml.targets import Eager, Onnx
from hpml.targets.onnx_session import OnnxSession, single_requests
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of
from tests.components.diagnose.conftest import MakeEngine, Network, shape_of

QUICK = DiagnoseConfig(requests=20, seconds=0.2)


def profiled(engine: Any, scratch: Path) -> Profile:
    channels, height, width = shape_of(engine)
    x_nchw = np.random.default_rng(0).standard_normal((4, channels, height, width), np.float32)
    return onnx_profile.profile(
        engine.path / "model.onnx",
        single_requests({"x_nchw": x_nchw}),
        threads=2,
        config=QUICK,
        scratch=scratch,
    )


def test_a_profile_that_a_full_disk_cut_short_is_said_to_be_so(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself says nothing."""
    ended = onnxruntime.InferenceSession.end_profiling

    def cut_short(session: onnxruntime.InferenceSession) -> str:
        file = Path(ended(session))
        file.write_bytes(file.read_bytes()[:1000])
        return str(file)

    monkeypatch.setattr(onnxruntime.InferenceSession, "end_profiling", cut_short)
    monkeypatch.setattr(errors, "_free_bytes", lambda path: 0)
    engine = make_engine(Network((3, 8, 8)).conv(4).head(2))
    with pytest.raises(StageFailed, match=f"the disk is full: {tmp_path}.* has 0.0 MB left"):
        profiled(engine, tmp_path)
    assert not list(tmp_path.glob("tmp*"))


def by_name(profile: Profile) -> dict[str, Layer]:
    return {layer.name: layer for layer in profile.layers}


def test_a_convolution_and_a_product_by_hand(make_engine: MakeEngine, tmp_path: Path) -> None:
    profile = profiled(make_engine(Network((16, 48, 48)).conv(32, stride=2).head(5)), tmp_path)
    layers = by_name(profile)
    conv, head = layers["conv0"], layers["head"]
    assert conv.flops == 2 * 24 * 24 * 32 * 16 * 3 * 3
    assert conv.weight_bytes == 4 * 32 * 16 * 3 * 3
    assert conv.activation_bytes == 4 * (16 * 48 * 48 + 32 * 24 * 24)
    assert conv.channels == (16, 32, 1)
    assert (head.flops, head.weight_bytes, head.activation_bytes) == (2 * 32 * 5, 4 * 32 * 5, 4 * (32 + 5))
    assert all(layer.precision == "fp32" for layer in profile.layers)
    assert conv.time_us > 0
    assert profile.signed_us is None


def test_channels_are_those_of_the_network_whatever_the_runtime_fills_up(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    layers = by_name(profiled(make_engine(Network((3, 20, 20)).conv(13).conv(27).head()), tmp_path))
    assert layers["conv2"].flops == 2 * 20 * 20 * 27 * 13 * 3 * 3
    assert layers["conv2"].channels[:2] == (13, 27)


def test_a_quantized_network_does_the_same_arithmetic_on_a_quarter_of_the_weights(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    network = Network((16, 24, 24)).conv(32).conv(32).head()
    fp32 = by_name(profiled(make_engine(network), tmp_path))
    network = Network((16, 24, 24)).conv(32).conv(32).head()
    int8 = by_name(profiled(make_engine(network, activations="uint8"), tmp_path))
    for name in ("conv0", "conv2", "head"):
        assert int8[name].flops == fp32[name].flops
        assert int8[name].precision == "int8"
    assert int8["conv2"].op == "QLinearConv"
    assert int8["conv2"].activation_bytes * 4 == fp32["conv2"].activation_bytes
    # beside the weights, a scale and a bias of each channel
    assert int8["conv2"].weight_bytes == pytest.approx(fp32["conv2"].weight_bytes / 4, rel=0.05)


def test_nodes_without_names_are_told_apart(make_engine: MakeEngine, tmp_path: Path) -> None:
    network = Network((16, 24, 24)).conv(16).then("Erf").conv(16).then("Erf").head()
    for node in network.nodes:
        node.name = ""
    profile = profiled(make_engine(network), tmp_path)
    assert sum(layer.op == "Erf" for layer in profile.layers) == 2
    assert {layer.flops for layer in profile.layers if layer.op == "Erf"} == {16 * 24 * 24}


def test_views_move_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    profile = profiled(make_engine(Network((16, 8, 8)).then("Flatten").linear(8, inputs=1024)), tmp_path)
    (view,) = (layer for layer in profile.layers if layer.op in ("Flatten", "Reshape"))
    assert (view.flops, view.activation_bytes) == (0, 0)


def test_shifting_the_signs_changes_no_answer(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(Network((16, 16, 16)).residual().residual().head(), activations="int8")
    graph = onnx.load(engine.path / "model.onnx")
    assert onnx_profile._make_unsigned(graph)
    onnx.save(graph, tmp_path / "unsigned.onnx")
    x_nchw = np.random.default_rng(1).standard_normal((8, 16, 16, 16), np.float32)
    signed, unsigned = (
        OnnxSession(file, device="cpu", threads=1).run({"x_nchw": x_nchw})[0]
        for file in (engine.path / "model.onnx", tmp_path / "unsigned.onnx")
    )
    # fp32 sums of the convolutions that stay in fp32 may round to the neighbouring step
    assert np.abs(signed - unsigned).max() <= 0.05 * np.abs(signed).max()
    assert not onnx_profile._make_unsigned(graph)  # none are left


def test_torch_eager_and_onnx_count_the_same(
    small_model: Artifact[ModelSpec], digits_data: Artifact[DatasetSpec], run_stage: Any, tmp_path: Path
) -> None:
    from hpml.components.diagnose.profilers import torch_profile
    from hpml.components.export import stage as export

    engines = [
        run_stage(export.run, target, model=small_model, data=digits_data) for target in (Eager(), Onnx())
    ]
    task = task_of(small_model.spec.task)
    requests = single_requests(task.features(rows_of(task.stored(digits_data, "validation"), slice(4))))
    session = Eager().load(engines[0].path, engines[0].spec, threads=2)
    eager = by_name(torch_profile.profile(session.run, requests, threads=2, config=QUICK))
    in_onnx = by_name(profiled(engines[1], tmp_path))
    shared = set(eager) & set(in_onnx)
    weighted = {name for name, layer in eager.items() if layer.channels.outputs}
    assert len(weighted) == 4 and weighted <= shared
    for name in weighted:
        assert eager[name].flops == in_onnx[name].flops > 0
        assert eager[name].channels.outputs == in_onnx[name].channels.outputs
        assert eager[name].activation_bytes == in_onnx[name].activation_bytes
    assert sum(eager[name].flops for name in weighted) == pytest.approx(2 * small_model.spec.macs, rel=0.02)
    assert all(layer.time_us > 0 for layer in eager.values())


def test_a_typical_time_is_the_mean_of_the_middle_half() -> None:
    assert typical_us([1, 1, 2, 3, 3, 1000, 2, 2]) == 2.25
    assert typical_us([4.0]) == 4.0


def test_requests_fit_the_time_and_its_bounds() -> None:
    assert requests_within(1.0, 10.0, least=5, most=200) == 100
    assert requests_within(1.0, 1000.0, least=5, most=200) == 5
    assert requests_within(1.0, 0.0, least=5, most=200) == 200
