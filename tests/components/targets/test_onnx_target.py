"""ONNX graphs: what is in them, what is not, and that the quantization spec is honoured."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from hpml import models
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.model import ArchitectureSpec, QuantizationSpec
from hpml.core import hardware
from hpml.core.errors import StageFailed
from hpml.core.hardware import products_saturate
from hpml.targets import Onnx
from hpml.targets.onnx_graph import export_graph, nodes_of_layers, save_graph, to_fp16, to_int8
from hpml.targets.onnx_session import OnnxSession, has_cuda
from tests.image_tasks import image_task

ROOT = Path(__file__).parents[3]
TASK = image_task()
[PREDICT] = TASK.operations()
STATIC = QuantizationSpec(
    scheme="static",
    weights="int8-per-channel",
    activations="uint8",
    calibration="minmax",
    calibration_rows=(),
)


def resnet() -> nn.Module:
    """A narrow ResNet-18 whose batch norms are not the identity."""
    torch.manual_seed(0)
    network = models.build(ArchitectureSpec(name="resnet18", arguments={"width": 8}), TASK)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.fixture(scope="module")
def x_nchw() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(64, 1, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("graphs") / "fp32.onnx"
    save_graph(export_graph(resnet(), PREDICT, opset=20), place)
    return place


def torch_logits(x_nchw: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return resnet()(torch.from_numpy(x_nchw)).numpy()


def answers(file: Path, x_nchw: np.ndarray) -> np.ndarray:
    [logits] = OnnxSession(file, device="cpu", threads=1).run({"x_nchw": x_nchw})
    return logits


def initializers(graph: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


def quantized_weights(file: Path) -> list[str]:
    """The torch names of the weights that are stored as int8."""
    return [
        name.removesuffix("_quantized")
        for name, values in initializers(onnx.load(file)).items()
        if values.dtype == np.int8 and name.endswith("weight_quantized")
    ]


# ------------------------------------------------------------------------------------------------------ fp32


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_any_batch_gives_torchs_logits(fp32, x_nchw, batch):
    np.testing.assert_allclose(answers(fp32, x_nchw[:batch]), torch_logits(x_nchw[:batch]), atol=1e-4)


def test_the_graph_is_what_the_bundle_promises(fp32):
    graph = onnx.load(fp32)
    assert [entry.name for entry in graph.graph.input] == ["x_nchw"]
    assert [entry.name for entry in graph.graph.output] == ["logits"]
    assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 20)]
    assert not any(
        tensor.HasField("data_location") and tensor.data_location for tensor in graph.graph.initializer
    )


def test_batch_norms_are_folded_before_quantization(fp32):
    assert "BatchNormalization" not in Counter(node.op_type for node in onnx.load(fp32).graph.node)


def test_nothing_says_where_it_was_made(fp32, x_nchw):
    int8 = fp32.with_name("paths.onnx")
    to_int8(fp32, int8, STATIC, {"x_nchw": x_nchw}, activations="uint8", excluded_nodes=[])
    home = str(Path.home()).encode()
    for file in (fp32, int8):
        content = file.read_bytes()
        for leak in (str(ROOT).encode(), b".py", b"/tmp", b"site-packages", home + b"/"):
            assert leak not in content, (file, leak)


@pytest.mark.slow  # imports torch twice more; test_chain finds every export cached
def test_bytes_do_not_depend_on_the_process(fp32, x_nchw, tmp_path):
    script = (
        "import sys; from pathlib import Path; import graphs_again as t; file = Path(sys.argv[1]);"
        "t.save_graph(t.export_graph(t.resnet(), t.PREDICT, opset=20), file);"
        "x = t.np.random.default_rng(0).normal(size=(64, 1, 8, 8)).astype(t.np.float32);"
        "t.to_int8(file, file.with_name('int8.onnx'), t.STATIC, {'x_nchw': x}, activations='uint8',"
        " excluded_nodes=[])"
    )
    (tmp_path / "graphs_again.py").write_text(Path(__file__).read_text())
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "fp32.onnx")],
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
    )
    int8 = fp32.with_name("here.onnx")
    to_int8(fp32, int8, STATIC, {"x_nchw": x_nchw}, activations="uint8", excluded_nodes=[])
    assert (tmp_path / "fp32.onnx").read_bytes() == fp32.read_bytes()
    assert (tmp_path / "int8.onnx").read_bytes() == int8.read_bytes()


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.reshape(2, 64))


class Branching(FixedBatch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) if float(x.sum()) > 0 else self.head(-x.flatten(1))


@pytest.mark.parametrize("network", [FixedBatch(), Branching()])
def test_a_network_that_cannot_be_exported_is_refused_in_one_line(network):
    with pytest.raises(StageFailed, match="cannot be exported to ONNX with a free batch") as failure:
        export_graph(network, PREDICT, opset=20)
    assert "\n" not in str(failure.value) and failure.value.fix


# ------------------------------------------------------------------------------------------------------ int8


@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("calibration", ["minmax", "percentile"])
def test_int8_graphs_hold_qdq_and_agree(fp32, x_nchw, tmp_path, activations, calibration):
    place = tmp_path / "int8.onnx"
    spec = STATIC.model_copy(update={"calibration": calibration})
    to_int8(fp32, place, spec, {"x_nchw": x_nchw[:37]}, activations=activations, excluded_nodes=[])
    kinds = Counter(node.op_type for node in onnx.load(place).graph.node)
    assert kinds["QuantizeLinear"] > 20 and kinds["DequantizeLinear"] > 20
    zero_points = [
        v for n, v in initializers(onnx.load(place)).items() if n.endswith("_zero_point") and v.ndim == 0
    ]
    assert {str(value.dtype) for value in zero_points} == {activations}
    expected = torch_logits(x_nchw)
    assert (answers(place, x_nchw).argmax(1) == expected.argmax(1)).mean() > 0.9
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("weights, scales", [("int8-per-channel", 8), ("int8-per-tensor", 1)])
def test_weights_are_symmetric_and_scaled_as_the_spec_says(fp32, x_nchw, tmp_path, weights, scales):
    place = tmp_path / "int8.onnx"
    spec = STATIC.model_copy(update={"weights": weights})
    to_int8(fp32, place, spec, {"x_nchw": x_nchw}, activations="uint8", excluded_nodes=[])
    stored = initializers(onnx.load(place))
    assert stored["groups.0.0.conv1.weight_scale"].size == scales
    assert not stored["groups.0.0.conv1.weight_zero_point"].any()


def test_excluded_layers_stay_in_fp32(x_nchw, tmp_path):
    graph = export_graph(resnet(), PREDICT, opset=20)
    excluded = nodes_of_layers({"model": graph}, ("stem.0", "groups.3", "head"))["model"]
    save_graph(graph, tmp_path / "fp32.onnx")
    place = tmp_path / "int8.onnx"
    to_int8(
        tmp_path / "fp32.onnx",
        place,
        STATIC,
        {"x_nchw": x_nchw},
        activations="uint8",
        excluded_nodes=excluded,
    )
    quantized = quantized_weights(place)
    stored = initializers(onnx.load(place))
    assert "groups.0.0.conv1.weight" in quantized and "groups.2.1.conv2.weight" in quantized
    kept = ["stem.0.weight", "head.weight", "groups.3.0.conv1.weight", "groups.3.1.conv2.weight"]
    for name in kept:
        assert name not in quantized
        assert stored[name].dtype == np.float32


def test_exclusions_find_linear_layers_whose_weights_the_exporter_transposed():
    vit = ArchitectureSpec(
        name="vit", arguments={"image_size": 8, "patch": 4, "dim": 16, "depth": 2, "heads": 2}
    )
    graph = export_graph(models.build(vit, TASK), PREDICT, opset=20)
    nodes = {node.name: node.op_type for node in graph.graph.node}
    named = nodes_of_layers({"model": graph}, ("blocks.1.mlp.0",))["model"]
    assert "MatMul" in {nodes[name] for name in named}
    assert not set(named) & set(nodes_of_layers({"model": graph}, ("blocks.0",))["model"])


def test_an_excluded_layer_without_a_node_is_refused(fp32):
    with pytest.raises(StageFailed, match="'nowhere' is not in the exported graph"):
        nodes_of_layers({"model": onnx.load(fp32)}, ("nowhere",))


def test_seven_bit_weights_stay_within_seven_bits(fp32, x_nchw, tmp_path):
    place = tmp_path / "int8.onnx"
    to_int8(
        fp32, place, STATIC, {"x_nchw": x_nchw}, activations="uint8", excluded_nodes=[], reduce_range=True
    )
    stored = initializers(onnx.load(place))
    names = [f"{name}_quantized" for name in quantized_weights(place)]
    assert max(int(np.abs(stored[name]).max()) for name in names) <= 64


def test_graphs_for_tensorrt_are_symmetric(fp32, x_nchw, tmp_path):
    place = tmp_path / "int8.onnx"
    to_int8(fp32, place, STATIC, {"x_nchw": x_nchw}, activations="int8", excluded_nodes=[], for_tensorrt=True)
    graph = onnx.load(place)
    stored = initializers(graph)
    zero_points = {name: value for name, value in stored.items() if name.endswith("zero_point")}
    assert zero_points and all(value.dtype == np.int8 and not value.any() for value in zero_points.values())
    assert stored["groups.0.0.conv1.weight"].dtype == np.float32  # behind its own Q/DQ
    assert not any(value.dtype == np.int32 for value in stored.values())  # no quantized bias
    assert (answers(place, x_nchw).argmax(1) == torch_logits(x_nchw).argmax(1)).mean() > 0.9


def test_fp16_graphs_compute_in_fp16_between_fp32_ends(fp32, x_nchw, tmp_path):
    place = tmp_path / "fp16.onnx"
    save_graph(to_fp16(onnx.load(fp32)), place)
    graph = onnx.load(place)
    assert all(v.dtype == np.float16 for n, v in initializers(graph).items() if n.endswith("weight"))
    assert graph.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert place.stat().st_size < 0.6 * fp32.stat().st_size
    np.testing.assert_allclose(answers(place, x_nchw), torch_logits(x_nchw), atol=0.05)


# --------------------------------------------------------------------------------------------------- loading


def engine(**identity: str) -> EngineSpec:
    return EngineSpec(
        target={"target": "onnx"},
        status="built",
        file="model.onnx",
        precision="int8",
        methods=(),
        task=TASK.model_dump(mode="json"),
        operations=TASK.operations(),
        identity={"device": "cpu", **identity},
    )


@pytest.mark.parametrize("location", ["../secret.bin", "deep/../../secret.bin", "/etc/hostname", "link.bin"])
def test_weights_outside_the_folder_are_refused(tmp_path, location):
    folder = tmp_path / "engine"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(StageFailed, match="ONNX Runtime cannot load"):
        Onnx().load(folder, engine(), threads=1)


def test_a_truncated_graph_is_refused(fp32, tmp_path):
    (tmp_path / "model.onnx").write_bytes(fp32.read_bytes()[:1000])
    with pytest.raises(StageFailed, match="ONNX Runtime cannot load") as failure:
        Onnx().load(tmp_path, engine(), threads=1)
    assert "\n" not in str(failure.value)


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.skipif(has_cuda(), reason="this ONNX Runtime has CUDA")
def test_what_is_meant_for_a_gpu_does_not_run_on_the_cpu_unsaid(fp32):
    with pytest.raises(StageFailed, match="would run on the CPU what was meant for a GPU"):
        OnnxSession(fp32, device="cuda", threads=1)


def test_an_engine_for_a_gpu_is_refused_without_one(tmp_path):
    with pytest.raises(StageFailed, match="runs on a GPU"):
        Onnx().load(tmp_path, engine(device="cuda"), threads=1)


def test_u8s8_is_refused_where_it_would_saturate(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: ("avx2",))
    assert products_saturate()
    with pytest.raises(StageFailed, match="built for CPUs with VNNI"):
        Onnx().load(tmp_path, engine(activations="uint8", weight_bits="8"), threads=1)
    monkeypatch.setattr(hardware, "cpu_flags", lambda: ("asimddp",))
    assert not products_saturate()


def test_loading_does_not_import_torch(onnx_file_engine):
    script = (
        "import sys; from pathlib import Path; from hpml.targets import Onnx;"
        "from hpml.artifacts.engine import EngineSpec; folder = Path(sys.argv[1]);"
        "engine = EngineSpec.model_validate_json((folder / 'engine.json').read_text());"
        "import numpy as np; session = Onnx().load(folder, engine, threads=1);"
        "answer = session.run({'x_nchw': np.zeros((2, 1, 8, 8), np.float32)});"
        "print(answer['logits'].shape, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(onnx_file_engine)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "(2, 10) False"


@pytest.fixture
def onnx_file_engine(fp32: Path, tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(fp32.read_bytes())
    (tmp_path / "engine.json").write_text(engine().model_dump_json())
    return tmp_path
