"""A step of Kubeflow Pipelines: its executor input is read as kfp reads it, and answered likewise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp.dsl.executor import create_artifact_instance
from kfp.pipeline_spec import pipeline_spec_pb2

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact
from hpml.components.executor_input import read_executor_input
from hpml.core.errors import UsageError

CNN = {"architecture": "cnn", "arguments": {"width": 4}}


def runtime_artifact(uri: str, **more: Any) -> dict[str, Any]:
    kind = {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}
    return {"artifacts": [{"name": "an-artifact", "type": kind, "uri": uri, "metadata": {}, **more}]}


def executor_input(
    inputs: dict[str, Any], outputs: dict[str, Any], file: str = "/tmp/kfp/executor_output.json"
) -> str:
    """As the launcher makes it: the JSON of a protobuf message."""
    fields = {
        "inputs": {"parameterValues": {"epochs": 3}, "artifacts": inputs},
        "outputs": {"artifacts": outputs, "outputFile": file, "parameters": {}},
    }
    message = json_format.ParseDict(fields, pipeline_spec_pb2.ExecutorInput())
    return json_format.MessageToJson(message)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/v2/run/task/data",
        "gs://bucket/a",
        "minio://mlpipeline/v2/artifacts/x",
        "/a/local/path",
    ],
)
def test_paths_are_those_of_kfp(uri: str) -> None:
    given = read_executor_input(executor_input({"data": runtime_artifact(uri)}, {}))
    expected = create_artifact_instance({"uri": uri}).path
    assert given.input_paths({"data": "data"}) == {"data": expected}


def test_a_custom_path_counts() -> None:
    given = read_executor_input(
        executor_input({}, {"out": runtime_artifact("s3://b/a", customPath="/mnt/shared/a")})
    )
    assert given.out() == "/mnt/shared/a"


@pytest.mark.parametrize("uri", ["relative/path", "http://host/a", "s3://../etc/passwd", "/a/../../etc", ""])
def test_a_hostile_path_is_refused(uri: str) -> None:
    given = read_executor_input(executor_input({"data": runtime_artifact(uri)}, {}))
    with pytest.raises(UsageError, match="has no path on this machine"):
        given.input_paths({"data": "data"})


def test_one_artifact_may_be_several_inputs_and_keys_keep_their_order() -> None:
    given = read_executor_input(
        executor_input({name: runtime_artifact(f"/in/{name}") for name in ("a", "b", "c")}, {})
    )
    paths = given.input_paths({"model": "c", "teacher": "c", "engines": {"int8/onnx": "b", "fp32": "a"}})
    assert paths == {
        "model": "/in/c",
        "teacher": "/in/c",
        "engines": {"int8/onnx": "/in/b", "fp32": "/in/a"},
    }
    assert isinstance(paths["engines"], dict) and list(paths["engines"]) == ["int8/onnx", "fp32"]


@pytest.mark.parametrize(
    ("names", "said"),
    [({}, "no input for the artifact 'dat'"), ({"data": "dat", "engines": {"a": "b"}}, "--names has 'b'")],
)
def test_what_belongs_to_no_input_is_refused(names: dict[str, Any], said: str) -> None:
    given = read_executor_input(executor_input({"dat": runtime_artifact("/a")}, {}))
    with pytest.raises(UsageError, match=said):
        given.input_paths(names)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"outputs": {"outputFile": ""}}', '{"outputs": 3}'])
def test_what_is_no_executor_input_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="no executor input of KFP v2"):
        read_executor_input(text)


def test_a_step_without_an_output_out_is_told() -> None:
    with pytest.raises(UsageError, match="no output artifact 'out'"):
        read_executor_input(executor_input({}, {"other": runtime_artifact("/a")})).out()


# ---------------------------------------------------------------------------------------------- a whole step


def run_step(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpml.components", *arguments, "--names", '{"data": "data"}']
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))


def test_a_training_as_a_step_of_kfp(digits_data: Artifact[DatasetSpec], tmp_path: Path) -> None:
    place, file = tmp_path / "not" / "yet" / "there", tmp_path / "kfp" / "executor_output.json"
    text = executor_input(
        {"data": runtime_artifact(str(digits_data.path))},
        {
            "out": runtime_artifact(str(place), metadata={"display_name": "the model"}),
            "metrics": runtime_artifact(str(tmp_path / "metrics")),
        },
        str(file),
    )
    config = ["--config", json.dumps({"model": CNN}), "--set", "epochs=1", "--set", "min_accuracy="]
    done = run_step("train", *config, "--executor-input", text)
    assert done.returncode == 0, done.stderr
    model = open_artifact(place, kind="model")
    metrics = dict(model.manifest.metrics)

    answer = json.loads(file.read_text())
    json_format.ParseDict(answer, pipeline_spec_pb2.ExecutorOutput())  # the launcher can read it
    [out] = answer["artifacts"]["out"]["artifacts"]
    assert out["uri"] == str(place) and out["name"] == "an-artifact"
    assert out["metadata"] == {"display_name": "the model", "digest": model.digest}
    [shown] = answer["artifacts"]["metrics"]["artifacts"]
    assert shown["metadata"] == metrics and metrics["validation_accuracy_top1"] > 0


def test_a_step_that_its_gate_refuses_fails_and_answers_nothing(
    digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    file = tmp_path / "executor_output.json"
    text = executor_input(
        {"data": runtime_artifact(str(digits_data.path))},
        {"out": runtime_artifact(str(tmp_path / "model"))},
        str(file),
    )
    config = json.dumps({"model": CNN, "epochs": 1, "min_accuracy": 1.0})
    done = run_step("train", "--config", config, "--executor-input", text)
    assert done.returncode == 5 and not file.exists()
    assert run_step("train", "--out", "x", "--executor-input", text).returncode == 2
