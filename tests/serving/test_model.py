"""Bundles that are not what they were, or never were what they say: none is served."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import pickle
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hpml.artifacts.operation import Operation
from hpml.core.errors import HpmlError, StageFailed
from hpml.serving import model as served
from hpml.serving.model import open_bundle
from hpml.serving.trial import try_open
from tests.serving.small_bundles import OPERATION, WEIGHTS, graph, logits, seal, write_bundle


def test_a_whole_bundle_is_opened_with_the_settings_it_was_measured_with(tmp_path: Path) -> None:
    opened = open_bundle(write_bundle(tmp_path / "b", version=3))
    assert (opened.name, opened.version, opened.digest) == ("small", "3", "digest-3")
    assert (opened.settings.threads, opened.settings.spinning) == (1, False)
    x_nchw = np.ones((2, 1, 4, 4), np.float32)
    assert np.allclose(opened.runs.run({"x_nchw": x_nchw})["logits"], logits(x_nchw), atol=1e-5)
    assert open_bundle(tmp_path / "b", threads=2).settings.threads == 2


def truncated(bundle: Path) -> None:
    file = bundle / "engine" / "model.onnx"
    file.write_bytes(file.read_bytes()[:-9])


def tampered(bundle: Path) -> None:
    file = bundle / "engine" / "model.onnx"
    file.write_bytes(file.read_bytes().replace(WEIGHTS.tobytes(), (-WEIGHTS).tobytes()))


def link(bundle: Path) -> None:
    file = bundle / "engine" / "model.onnx"
    file.rename(bundle.parent / "elsewhere.onnx")
    file.symlink_to(bundle.parent / "elsewhere.onnx")


def linked_folder(bundle: Path) -> None:
    (bundle / "engine").rename(bundle.parent / "elsewhere")
    (bundle / "engine").symlink_to(bundle.parent / "elsewhere")


def added(bundle: Path) -> None:
    (bundle / "engine" / "other.onnx").write_bytes(b"")


def fifo(bundle: Path) -> None:
    (bundle / "bundle.json").unlink()
    os.mkfifo(bundle / "bundle.json")


def no_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("{")


def deep_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("[" * 200_000)


def outside(bundle: Path) -> None:
    told = json.loads((bundle / "bundle.json").read_text())
    told["file"] = "../../../etc/passwd"
    told["files"]["../../../etc/passwd"] = "0"
    (bundle / "bundle.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "damage",
    [truncated, tampered, link, linked_folder, added, fifo, no_json, deep_json, outside],
    ids=lambda damage: damage.__name__,
)
def test_a_bundle_that_was_changed_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    damage(bundle)
    with pytest.raises(HpmlError) as refused:
        open_bundle(bundle)
    assert refused.value.exit_code in (3, 4)


def refused_graph(tmp_path: Path, model: onnx.ModelProto, **facts: Any) -> str:
    """Why a bundle of this graph, whose digests are right, is not served."""
    with pytest.raises(StageFailed) as refused:
        open_bundle(write_bundle(tmp_path / "b", model, **facts))
    return str(refused.value)


def test_weights_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(WEIGHTS.tobytes())
    model = graph()
    [weights] = model.graph.initializer
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="../../secret.bin")
    assert "outside its folder" in refused_graph(tmp_path, model)


def test_a_graph_in_a_circle_is_refused(tmp_path: Path) -> None:
    model = graph(
        WEIGHTS,
        helper.make_node("Add", ["x_nchw", "b"], ["a"]),
        helper.make_node("Add", ["a", "x_nchw"], ["b"]),
    )
    assert "ONNX Runtime cannot load" in refused_graph(tmp_path, model)


def test_a_graph_of_too_many_nodes_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "MOST_NODES", 1_000)
    names = ["x_nchw", *(f"n{place}" for place in range(1_500))]
    chain = [helper.make_node("Relu", [a], [b]) for a, b in pairwise(names)]
    assert "nodes, functions in their places, are 1,502; 1,000 are allowed" in refused_graph(
        tmp_path, graph(WEIGHTS, *chain)
    )


def calling_each_other(calls: dict[str, list[str]]) -> onnx.ModelProto:
    """A graph that calls the first of these functions, which call others by name."""
    model = graph(WEIGHTS, helper.make_node("f0", ["x_nchw"], ["called"], domain="mine"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model.opset_import.append(opsets[1])
    for name, called in calls.items():
        body = [
            helper.make_node(one, ["x"], [f"y{place}"], domain="mine") for place, one in enumerate(called)
        ]
        last = helper.make_node("Identity", ["x"], ["y"])
        model.functions.append(helper.make_function("mine", name, ["x"], ["y"], [*body, last], opsets))
    return model


def test_functions_that_call_functions_are_counted_as_often_as_they_are_called(tmp_path: Path) -> None:
    doubling = {f"f{place}": [f"f{place + 1}"] * 2 for place in range(60)} | {"f60": []}
    assert "100,000 are allowed" in refused_graph(tmp_path, calling_each_other(doubling))
    circle = calling_each_other({"f0": ["f1"], "f1": ["f0"]})
    assert "are without end" in refused_graph(tmp_path / "circle", circle)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("_MOST_GOLDEN_BYTES", "the golden samples of predict are not read: they have 304 bytes, 100 are"),
        ("_MOST_JSON_BYTES", r"bundle\.json cannot be read: it has more than 100 bytes"),
    ],
)
def test_files_that_are_too_large_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, said: str
) -> None:
    monkeypatch.setattr(f"hpml.measuring.subjects.bundle.{bound}", 100)
    with pytest.raises(StageFailed, match=said):
        open_bundle(write_bundle(tmp_path / "b"))


def endless_graph() -> onnx.ModelProto:
    """As `graph`, beside a loop that goes on for as long as anybody has patience."""
    model = graph()
    kinds = {"i": TensorProto.INT64, "cond": TensorProto.BOOL, "go_on": TensorProto.BOOL}
    values = {name: helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()}
    carried = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("before", "after")]
    body = helper.make_graph(
        [helper.make_node("Identity", ["cond"], ["go_on"]), helper.make_node("Cos", ["before"], ["after"])],
        "body",
        [values["i"], values["cond"], carried[0]],
        [values["go_on"], carried[1]],
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(2**62), "times"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "zero"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "all"))
    model.graph.node[-1].output[0] = "fast"
    model.graph.node.extend(
        [
            helper.make_node("Reshape", ["x_nchw", "all"], ["flat"]),
            helper.make_node("Loop", ["times", "true", "flat"], ["looped"], body=body),
            helper.make_node("ReduceMax", ["looped"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "zero"], ["nothing"]),
            helper.make_node("Add", ["fast", "nothing"], ["logits"]),
        ]
    )
    return model


def large_graph() -> onnx.ModelProto:
    """As `graph`, beside 4 GB of numbers that are in no file."""
    model = graph(
        WEIGHTS,
        helper.make_node("ConstantOfShape", ["sizes"], ["ones"]),
        helper.make_node("ReduceMax", ["x_nchw"], ["most"], keepdims=0),
        helper.make_node("Mul", ["ones", "most"], ["large"]),
        helper.make_node("ReduceMax", ["large"], ["zero"], keepdims=0),
        helper.make_node("Add", ["x_nchw", "zero"], ["added"]),
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([10**9]), "sizes"))
    model.graph.node[5].input[0] = "added"
    return model


@pytest.mark.parametrize(
    ("model", "bounds", "said"),
    [
        (graph(), {}, ""),
        (endless_graph(), {"seconds": 6}, "the bundle is not served: it was not open after 6 s"),
        (large_graph(), {"memory_bytes": 300_000_000}, r"\(opening it may take 300\.0 MB\)"),
        (
            graph(-WEIGHTS),
            {},
            "^the bundle does not reproduce its golden outputs: a number of logits differs",
        ),
    ],
    ids=["one like others", "endless", "large", "wrong"],
)
def test_a_process_of_its_own_tries_it_within_bounds(
    tmp_path: Path, model: onnx.ModelProto, bounds: dict[str, float], said: str
) -> None:
    bundle = write_bundle(tmp_path / "b", model)
    if not said:
        try_open("bundle", bundle, threads=1)
        return
    with pytest.raises(StageFailed, match=said):
        try_open("bundle", bundle, threads=1, **bounds)  # type: ignore[arg-type]


def test_weights_that_are_no_numbers_are_refused_even_where_no_output_shows_it(tmp_path: Path) -> None:
    model = graph()
    hidden = numpy_helper.from_array(np.array([1, np.nan], np.float32), "hidden")
    model.graph.initializer.append(hidden)
    assert "'hidden' are not all numbers" in refused_graph(tmp_path, model)


def test_an_engine_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    x_nchw = np.ones((4, 1, 4, 4), np.float32)
    golden = {"x_nchw": x_nchw, "logits": logits(x_nchw) + 1}
    assert "does not reproduce its golden outputs" in refused_graph(tmp_path, graph(), golden=golden)


def test_golden_samples_that_are_no_numbers_agree_with_nothing(tmp_path: Path) -> None:
    x_nchw = np.full((4, 1, 4, 4), np.nan, np.float32)
    assert "golden" in refused_graph(tmp_path, graph(), golden={"x_nchw": x_nchw, "logits": logits(x_nchw)})


def test_an_engine_for_a_gpu_is_refused_where_there_is_none(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    told = json.loads((bundle / "bundle.json").read_text())
    told["engine"]["identity"]["device"] = "cuda"
    seal(bundle, told)
    with pytest.raises(HpmlError, match="runs on a GPU"):
        open_bundle(bundle)


def test_operators_of_a_library_are_refused(tmp_path: Path) -> None:
    model = graph(WEIGHTS, helper.make_node("Steal", ["x_nchw"], ["stolen"], domain="evil"))
    assert "evil:Steal" in refused_graph(tmp_path, model)


def test_a_shape_that_is_not_the_graphs_is_refused(tmp_path: Path) -> None:
    for place, shape in enumerate([["batch"], ["batch", 1, 4, 5], []]):
        told = OPERATION.model_dump(mode="json")
        told["inputs"][0]["shape"] = shape
        bundle = write_bundle(tmp_path / str(place), operations=[Operation.model_validate(told)])
        with pytest.raises(StageFailed, match="not float32"):
            open_bundle(bundle)


def test_a_batch_that_is_not_free_is_refused(tmp_path: Path) -> None:
    fixed = helper.make_node("Reshape", ["x_nchw", "four"], ["reshaped"])
    model = graph(WEIGHTS, fixed)
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 1, 4, 4]), "four"))
    model.graph.node[1].input[0] = "reshaped"
    with pytest.raises(Exception, match=r"Reshape|of one row"):
        open_bundle(write_bundle(tmp_path / "b", model))


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps([1])])
def test_a_golden_file_without_an_array_is_refused(tmp_path: Path, content: bytes) -> None:
    bundle = write_bundle(tmp_path / "b")
    (bundle / "logits.npy").write_bytes(content)
    seal(bundle, json.loads((bundle / "bundle.json").read_text()))
    with pytest.raises(StageFailed, match=r"logits\.npy holds no array"):
        open_bundle(bundle)


def test_a_name_that_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    for place, name in enumerate(["", "a/b", "a\nb", "x" * 100]):
        with pytest.raises(StageFailed, match="no name for a model"):
            open_bundle(write_bundle(tmp_path / str(place), model_name=name))


def test_a_users_processing_is_run_only_where_it_is_allowed(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", task={"task": "mine:Task"})
    (bundle / "processing.py").write_text(
        "import numpy as np\n"
        "def preprocess(raw, facts): return {'x_nchw': np.full((1, 1, 4, 4), raw['fill'], 'float32')}\n"
        "def postprocess(outputs, facts): return {'sum': float(outputs['logits'].sum())}\n"
    )
    told = json.loads((bundle / "bundle.json").read_text())
    seal(bundle, told)
    assert open_bundle(bundle).endpoint is None
    cache = bundle / "__pycache__"  # which nobody listed: Python would run it in place of the file
    cache.mkdir()
    stolen = compile("raise SystemExit('stolen')", "processing.py", "exec")
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
    tag = sys.implementation.cache_tag
    (cache / f"processing.{tag}.pyc").write_bytes(head + marshal.dumps(stolen))
    endpoint = open_bundle(bundle, run_code=True).endpoint
    assert endpoint
    assert endpoint.path == "/v1/predict"
    assert (endpoint.feeds(b'{"fill": 2}')["x_nchw"] == 2).all()
    with pytest.raises(ValueError, match="KeyError"):
        endpoint.feeds(b"{}")
