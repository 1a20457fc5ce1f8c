"""Networks that answer sequences: at once and step by step, in torch and as engines, fp32 and int8."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import stage as compress
from hpml.components.compress.distill import Distill
from hpml.components.compress.quantize import Quantize
from hpml.components.export import stage as export
from hpml.core.errors import UsageError
from hpml.models.recurrent import Gru
from hpml.pipelines.terminal import chat
from hpml.targets import Tolerance
from hpml.targets.onnx import Onnx
from hpml.tasks import task_of
from hpml.tasks.sequence_to_sequence.decoding import decoded, encoded
from hpml.tasks.torch_session import TorchSession
from tests.conftest import Hpml, RunStage
from tests.image_tasks import image_task
from tests.tasks.sequence_to_sequence.conftest import WORDS


@pytest.fixture(scope="module")
def engine(
    translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec], run_stage_once: RunStage
) -> Artifact[EngineSpec]:
    built: Artifact[EngineSpec] = run_stage_once(export.run, Onnx(), model=translator, data=numbers)
    return built


def test_learns(translator: Artifact[ModelSpec]) -> None:
    assert translator.spec.quality["perplexity"] < 3  # a decoder alone has more than 7


def test_a_target_step_by_step_is_a_target_at_once(
    translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec]
) -> None:
    task = task_of(translator.spec.task)
    stored = {name: np.asarray(array[:5]) for name, array in task.stored(numbers, "test").items()}
    runs = TorchSession(models.load(translator), task, translator.spec.operations)
    features = task.features(stored)
    whole, _ = decoded(runs, features["input_ids"], encoded(runs, features["source_ids"]))
    state = encoded(runs, features["source_ids"])
    for step in range(whole.shape[1]):
        logits, state = decoded(runs, features["input_ids"][:, step : step + 1], state)
        np.testing.assert_allclose(logits[:, 0], whole[:, step], atol=1e-4)


def test_padding_changes_nothing(translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec]) -> None:
    task = task_of(translator.spec.task)
    runs = TorchSession(models.load(translator), task, translator.spec.operations)
    source_ids = np.asarray(task.stored(numbers, "test")["source_ids"][:1])
    tokens = int((source_ids != 0).sum())
    assert tokens < source_ids.shape[1]
    input_ids = np.array([[1, 5, 6]])
    short, long = (
        decoded(runs, input_ids, encoded(runs, one))[0] for one in (source_ids[:, :tokens], source_ids)
    )
    np.testing.assert_allclose(short, long, atol=1e-5)


def test_engines_answer_as_the_network(engine: Artifact[EngineSpec]) -> None:
    assert engine.spec.status == "built"
    assert set(engine.spec.graphs) == {"encoder", "decoder"}
    assert (engine.path / "tokenizer.json").is_file()
    assert engine.spec.agreement == 1 and engine.spec.generation_agreement == 1
    assert engine.spec.max_abs_error < 1e-4


def test_int8_is_of_layers_and_answers_alike(
    translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec], run_stage: RunStage
) -> None:
    method = Quantize(activations="int8", calibration_samples=64)
    model = run_stage(compress.run, method, model=translator, teacher=translator, data=numbers)
    allowed = Tolerance(min_agreement=0.9)  # of some dozens of ids
    engine = run_stage(export.run, Onnx(tolerance=allowed), model=model, data=numbers)
    assert engine.spec.precision == "int8"
    assert set(engine.spec.quality) == {"perplexity", "bleu"}
    graph = onnx.load(engine.path / engine.spec.graphs["decoder"]).graph
    quantized = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    in_int8 = [set(node.input[:2]) <= quantized for node in products]
    assert any(in_int8)
    weights = [
        one for one in graph.initializer if one.data_type == onnx.TensorProto.INT8 and len(one.dims) == 2
    ]
    assert len(weights) == sum(in_int8), "each layer, and no product of attention"


def test_layers_are_excluded_by_their_names_in_the_network(
    translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec], run_stage: RunStage
) -> None:
    method = Quantize(activations="int8", calibration_samples=8, excluded_layers=("encoder", "decoder.head"))
    model = run_stage(compress.run, method, model=translator, teacher=translator, data=numbers)
    engine = run_stage(export.run, Onnx(tolerance=Tolerance(min_agreement=0)), model=model, data=numbers)
    weights = {
        name: {one.data_type for one in onnx.load(engine.path / file).graph.initializer if len(one.dims) == 2}
        for name, file in engine.spec.graphs.items()
    }
    assert weights["encoder"] == {onnx.TensorProto.FLOAT}
    assert weights["decoder"] == {onnx.TensorProto.FLOAT, onnx.TensorProto.INT8}


def test_a_smaller_network_learns_from_it(
    translator: Artifact[ModelSpec], numbers: Artifact[DatasetSpec], run_stage: RunStage
) -> None:
    method = Distill(epochs=1, optimizer="adamw", label_smoothing=0, temperature=1)
    model = run_stage(compress.run, method, model=translator, teacher=translator, data=numbers)
    assert model.spec.quality["perplexity"] < 1.2 * translator.spec.quality["perplexity"]


@pytest.mark.parametrize("beams", ["1", "3"])
def test_chat(engine: Artifact[EngineSpec], hpml: Hpml, monkeypatch: pytest.MonkeyPatch, beams: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n\nseven"))
    said = hpml("chat", str(engine.path), "--beam", beams)
    assert said.returncode == 0, said.stderr
    answers = said.stdout.splitlines()
    assert len(answers) == 2, "a line for each that is not blank"
    assert set(" ".join(answers).split()) <= set(WORDS.values()), answers


def test_chat_with_what_cannot_talk(
    numbers: Artifact[DatasetSpec], hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    said = hpml("chat", str(numbers.path))
    assert said.returncode == 2 and "it is a dataset" in said.stderr
    assert hpml("chat", str(tmp_path)).returncode == 2
    assert hpml("chat", "no-such-run").returncode == 2
    assert "there is no folder no/such" in hpml("chat", "no/such").stderr
    for task in (image_task().model_dump(mode="json"), {"task": "mytasks:Mine"}):
        engine = EngineSpec.model_construct(task=task)
        with pytest.raises(
            UsageError, match=r"^it does not talk: its task is .* -> give one of language_modeling or seq"
        ):
            chat._talker("it", engine)


def test_a_gru_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Gru(3, 4, directions=2), torch.nn.GRU(3, 4, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for direction, suffix in enumerate(("", "_reverse")):
            weights = ours._weights_of_torch(direction)
            for name, weight in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True):
                getattr(theirs, f"{name}_l0{suffix}").copy_(weight)
    x, lengths = torch.randn(3, 6, 3), torch.tensor([4, 6, 1], dtype=torch.int32)
    y, last = ours(x, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        expected, expected_last = theirs(x[row : row + 1, :length])
        torch.testing.assert_close(y[row, :length], expected[0])
        torch.testing.assert_close(last[row], expected_last[:, 0].flatten())
        assert not y[row, length:].any()
