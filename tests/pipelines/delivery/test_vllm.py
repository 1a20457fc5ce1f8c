"""`hpml deploy --to vllm`: the trained network as transformers loads it, and how vLLM is told to serve it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpml import models
from hpml.artifacts.folder import Artifact, Lineage, seal_artifact
from hpml.artifacts.model import ModelSpec, QuantizationSpec
from hpml.artifacts.operation import Operation, TensorSpec
from hpml.components.prepare import stage as prepare
from hpml.components.train import stage as train
from hpml.components.train.config import TrainConfig
from hpml.pipelines import graph
from hpml.pipelines import recipe as recipes
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.plan import trace
from hpml.tasks.language_modeling.sources import Chitchat
from hpml.tasks.language_modeling.tokenizer import encoded, load_tokenizer
from tests.conftest import Hpml, RunStage
from tests.pipelines.delivery.bundles import bundle_of
from tests.serving.small_bundles import seal, write_bundle
from tests.tasks.language_modeling.model_folders import IDS, write_folder

GOLDEN = Path(__file__).with_name("golden") / "vllm"
CONTEXT = 32
NEXT = Operation(
    name="prefill",
    inputs=(TensorSpec(name="input_ids", dtype="int64", shape=("batch", "sequence")),),
    outputs=(TensorSpec(name="logits", shape=("batch", "sequence", IDS)),),
)
Trained = tuple[Path, Artifact[Any], Artifact[ModelSpec]]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_stage_once: RunStage
) -> Trained:
    """A model's folder of transformers, data in its tokens, and the network after an epoch of them."""
    options = {"n_positions": CONTEXT} if request.param == "gpt2" else {"dtype": "bfloat16"}
    folder = write_folder(tmp_path_factory.mktemp("models") / request.param, request.param, **options)
    data = run_stage_once(prepare.run, Chitchat(conversations=40, context=CONTEXT, tokenizer=folder))
    config = TrainConfig(
        model={"architecture": "transformers"},
        weights=folder,
        epochs=1,
        optimizer="adamw",
        learning_rate=0.01,
        label_smoothing=0,
        batch_size=16,
    )
    return folder, data, run_stage_once(train.run, config, data=data)


def workspace(home: Path, trained: Trained, **spec: Any) -> None:
    """A run that trained and exported the network, with its bundle; spec: what is otherwise of the model."""
    folder, data, model = trained
    copy = home / "copy"
    shutil.copytree(model.path, copy)
    (copy / "manifest.json").unlink()
    lineage = Lineage.model_validate(model.manifest.lineage)
    seal_artifact(copy, spec=model.spec.model_copy(update=spec), metrics={}, lineage=lineage)
    digests = {"train": Store(home).add(copy), "export": "digest-1"}

    recipe = home / "small.yaml"
    told = {
        "data": {"source": "chitchat", "conversations": 40, "context": CONTEXT, "tokenizer": str(folder)},
        "train": {"model": "transformers", "weights": str(folder)},
    }
    recipe.write_text(yaml.safe_dump(told))
    loaded = recipes.load(recipe)
    record = run_record.start(home, "small-run", "small", str(recipe), trace(graph.graph, loaded.recipe))
    steps = {
        name: StepRecord(stage=step.stage, status="done", digest=digests.get(name.removesuffix("-onnx"), ""))
        for name, step in record.steps.items()
    }
    run_record.save(home, record.model_copy(update={"steps": steps, "status": "done"}))
    (home / record.id / "recipe.yaml").write_text(recipes.to_yaml(loaded.recipe))

    golden = {"input_ids": np.zeros((1, 2), np.int64), "logits": np.zeros((1, 2, IDS), np.float32)}
    bundle = home / record.id / "bundle"
    write_bundle(bundle, task=data.spec.task, operations=[NEXT], golden=golden)
    shutil.copy(data.file("tokenizer.json"), bundle / "engine")
    told = json.loads((bundle / "bundle.json").read_text())
    seal(bundle, {name: value for name, value in told.items() if name != "files"})


def written(hpml: Hpml, home: Path, *arguments: str) -> tuple[Path, dict[str, Any], list[str]]:
    """The model's folder, the service, and the commands."""
    run = ("deploy", "small-run", "--to", "vllm", "-o", "out", "--home", str(home))
    answer = hpml(*run, *arguments)
    assert answer.returncode == 0, answer.stderr
    out = home.parent / "out"
    service = yaml.safe_load((out / "compose.yaml").read_text())["services"]["server"]
    [volume] = service["volumes"]
    assert volume["target"] == "/model" and volume["read_only"]
    return out / volume["source"], service, answer.stdout.splitlines()


def logits(network: Any, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = network(input_ids=input_ids).logits
    return found


def test_transformers_loads_the_trained_network_and_its_tokenizer(
    hpml: Hpml, tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of the checkpoint, and not those of what the training began with."""
    begun_with, data, model = trained
    workspace(tmp_path / "runs", trained)
    folder, _, _ = written(hpml, tmp_path / "runs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    input_ids = torch.from_numpy(np.random.default_rng(0).integers(0, IDS, (2, CONTEXT)))
    network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    checkpoint = models.load(model)
    with torch.no_grad():
        expected = checkpoint(input_ids)
    before = AutoModelForCausalLM.from_pretrained(begun_with, dtype=torch.float32)
    torch.testing.assert_close(logits(network, input_ids), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(before, input_ids), expected, atol=0.1)

    tokenizer, text = AutoTokenizer.from_pretrained(folder, local_files_only=True), "hello, how are you?"
    [ids] = encoded(load_tokenizer(data.file("tokenizer.json")), [text])
    assert tokenizer(text)["input_ids"] == ids and tokenizer.eos_token_id == 0
    assert network.generation_config.eos_token_id == 0
    readable = [path.stat().st_mode & 0o004 for path in folder.iterdir()]
    assert all(readable) and {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_what_is_written_is_what_was_reviewed(hpml: Hpml, tmp_path: Path, trained: Trained) -> None:
    """What is meant to change: WRITE_GOLDEN=yes pytest tests/pipelines/delivery, then read the diff."""
    (tmp_path / "token").write_text("a-token-of-a-test\n")
    (tmp_path / "token").chmod(0o600)
    workspace(tmp_path / "runs", trained)
    folder, service, commands = written(
        hpml, tmp_path / "runs", "--token-file", "token", "--memory", "16Gi", "--cpus", "4", "--port", "9000"
    )
    assert service["command"][service["command"].index("--dtype") + 1] == "bfloat16"  # as it was published
    digest = folder.name.removeprefix("model-")
    found = {"compose.yaml": (tmp_path / "out" / "compose.yaml").read_text()}
    found["commands"] = "\n".join([*commands, ""])
    found = {
        name: text.replace(str(tmp_path), "/ROOT").replace(digest, "DIGEST") for name, text in found.items()
    }
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        for name, text in found.items():
            (GOLDEN / name).write_text(text)
    assert found == {file.name: file.read_text() for file in GOLDEN.iterdir()}


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
def test_the_token_reaches_vllm_and_an_empty_one_starts_nothing(
    hpml: Hpml, tmp_path: Path, trained: Trained
) -> None:
    """The entrypoint runs, with a stand-in for vLLM and this machine in the place of the container."""
    token = tmp_path / "token"
    token.write_text("a $HOME of a test\n")
    workspace(tmp_path / "runs", trained)
    _, service, _ = written(hpml, tmp_path / "runs", "--token-file", "token")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text('#!/bin/sh\necho "$VLLM_API_KEY"; echo "$@"\n')
    (tmp_path / "bin" / "vllm").chmod(0o755)
    command = [one.replace("$$", "$") for one in (*service["entrypoint"], *service["command"])]
    command = [one.replace("/run/secrets/token", str(token)) for one in command]
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def started() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=path, capture_output=True, text=True)

    given = "--served-model-name small --host 0.0.0.0 --port 8000 --max-model-len 32 --dtype float32"
    assert started().stdout == f"a $HOME of a test\nserve /model {given}\n"
    token.write_text("\n")
    assert started().returncode and not started().stdout
    token.unlink()
    assert started().returncode and not started().stdout
    assert "of a test" not in json.dumps(service)


QUANTIZED = QuantizationSpec(
    scheme="static",
    weights="int8-per-channel",
    activations="auto",
    calibration="minmax",
    calibration_rows=(0,),
)


@pytest.mark.parametrize("trained", ["gpt2"], indirect=True)
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"quantization": QUANTIZED}, "it is int8, and a model's folder of transformers holds no such"),
        ({"channel_plan": {"a": {"in_channels": 1}}}, "it is pruned, and a model's folder"),
        ({"architecture": {"name": "decoder"}}, "and this is a decoder -> train one with train.model"),
    ],
)
def test_what_vllm_does_not_load_is_refused(
    hpml: Hpml, tmp_path: Path, trained: Trained, spec: dict[str, Any], said: str
) -> None:
    architecture = trained[2].spec.architecture
    spec = {**spec, "architecture": architecture.model_copy(update=spec.get("architecture", {}))}
    workspace(tmp_path / "runs", trained, **spec)
    answer = hpml("deploy", "small-run", "--to", "vllm", "-o", "out", "--home", "runs")
    [line] = answer.stderr.splitlines()
    assert answer.returncode == 3 and said in line and not (tmp_path / "out").exists()


def test_pictures_and_bundles_without_their_run_are_refused(
    hpml: Hpml, tmp_path: Path, run_stage: RunStage
) -> None:
    bundle_of(tmp_path / "pictures")
    answer = hpml("deploy", "pictures", "--to", "vllm", "-o", "out")
    assert answer.returncode == 3 and "this is of the task image_classification" in answer.stderr
    data = run_stage(prepare.run, Chitchat(conversations=40, context=CONTEXT, vocabulary_size=400))
    golden = {"input_ids": np.zeros((1, 2), np.int64), "logits": np.zeros((1, 2, IDS), np.float32)}
    write_bundle(tmp_path / "texts", task=data.spec.task, operations=[NEXT], golden=golden)
    answer = hpml("deploy", "texts", "--to", "vllm", "-o", "out")
    assert answer.returncode == 2 and "has made the engine of small version 1" in answer.stderr
    assert "-> give --home of the workspace" in answer.stderr and not (tmp_path / "out").exists()
