"""Engines of a language model: the same logits, the same continuations, in fp32 and int8."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import METHODS
from hpml.components.compress import stage as compress
from hpml.components.export import stage as export
from hpml.core.errors import ConfigInvalid
from hpml.targets.onnx import Onnx
from hpml.tasks import golden, task_of
from hpml.tasks.language_modeling.cache import decode_feeds, greedy, likeliest, prefill
from hpml.tasks.torch_session import TorchSession
from tests.conftest import RunStage

Data, Model, Engine = Artifact[DatasetSpec], Artifact[ModelSpec], Artifact[EngineSpec]


@pytest.fixture(scope="module")
def int8_engine(conversations: Data, talker: Model, run_stage_once: RunStage) -> Engine:
    method = METHODS["quantize"](calibration_samples=32)
    model = run_stage_once(compress.run, method, model=talker, teacher=talker, data=conversations)
    return run_stage_once(export.run, Onnx(), model=model, data=conversations)


def test_the_network_learned_something(conversations: Data, talker: Model) -> None:
    vocabulary_size = task_of(conversations.spec.task).vocabulary_size
    assert talker.spec.quality["perplexity"] < 0.6 * vocabulary_size


def test_an_engine_answers_and_continues_as_its_network(engine: Engine, talker: Model) -> None:
    spec = engine.spec
    assert spec.status == "built" and spec.agreement == 1 and spec.generation_agreement == 1
    assert spec.max_abs_error < 1e-4
    assert spec.quality["perplexity"] == pytest.approx(talker.spec.quality["perplexity"], rel=1e-4)


def test_the_graph_has_the_names_and_the_dimensions_of_generators(engine: Engine) -> None:
    graph = onnx.load(engine.file("model.onnx")).graph
    shapes = {
        one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
        for one in (*graph.input, *graph.output)
    }
    assert shapes["input_ids"] == ["batch", "sequence"]
    assert shapes["attention_mask"] == ["batch", "past + sequence"]
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past", 16]
    assert shapes["logits"][:2] == ["batch", "sequence"]
    assert len(shapes) == 2 + 4 + 1 + 4


def test_an_engine_takes_any_batch_and_any_length(engine: Engine, talker: Model) -> None:
    task = task_of(engine.spec.task)
    runs = [
        Onnx().load(engine.path, engine.spec, threads=1),
        TorchSession(models.load(talker), task, talker.spec.operations),
    ]
    prompts = np.random.default_rng(0).integers(0, task.vocabulary_size, (3, 7))
    for rows, length in ((1, 1), (3, 7), (2, 5)):
        one, other = (greedy(each, prompts[:rows, :length], 4) for each in runs)
        assert (one == other).all() and one.shape == (rows, 4)
    answer = prefill(runs[0], prompts)
    more = runs[0].run(decode_feeds(likeliest(answer), answer), "decode")
    assert more["present.0.key"].shape[2] == 8 and more["logits"].shape[:2] == (3, 1)


def test_both_operations_have_golden_requests(engine: Engine) -> None:
    decode, at_once = engine.spec.operations
    inputs = {
        one.name: golden.load(engine.path, engine.spec.operations, one, [each.name for each in one.inputs])
        for one in (decode, at_once)
    }
    context = task_of(engine.spec.task).context
    assert inputs["decode"]["input_ids"].shape == (16, 1)
    assert inputs["decode"]["past_key_values.0.key"].shape[2] == context // 2
    assert inputs["prefill"]["input_ids"].shape == (16, context)
    assert inputs["prefill"]["past_key_values.0.key"].shape[2] == 0


def test_int8_is_of_all_layers_and_of_nothing_else(int8_engine: Engine) -> None:
    spec = int8_engine.spec
    assert spec.status == "built" and spec.precision == "int8" and spec.agreement > 0.97
    graph = onnx.load(int8_engine.file("model.onnx")).graph
    made_by = {output: node for node in graph.node for output in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    in_int8 = [
        node for node in products if all(made_by[name].op_type == "DequantizeLinear" for name in node.input)
    ]
    assert len(in_int8) == 2 * 4 + 1  # of each block qkv, projection and two of the MLP; and the head
    assert len(products) == len(in_int8) + 2 * 2  # attention stays as it is
    operators = Counter(node.op_type for node in graph.node)
    assert operators["QuantizeLinear"] == len(in_int8)
    names = {
        one.name.partition(".weight")[0]
        for one in graph.initializer
        if one.data_type == onnx.TensorProto.INT8
    }
    assert {"head", "blocks.0.attention.qkv", "blocks.1.mlp.down"} <= names, (
        "a diagnosis names layers by them"
    )


def test_layers_that_are_excluded_stay_fp32(conversations: Data, talker: Model, run_stage: RunStage) -> None:
    method = METHODS["quantize"](calibration_samples=8, excluded_layers=["head", "blocks.0.mlp"])
    model = run_stage(compress.run, method, model=talker, teacher=talker, data=conversations)
    engine = run_stage(export.run, Onnx(), model=model, data=conversations)
    operators = Counter(node.op_type for node in onnx.load(engine.file("model.onnx")).graph.node)
    assert operators["QuantizeLinear"] == 2 * 4 - 2


def test_distillation_learns_from_a_teacher(conversations: Data, talker: Model, run_stage: RunStage) -> None:
    options = {"optimizer": "adamw", "learning_rate": 1e-4, "label_smoothing": 0, "temperature": 1}
    method = METHODS["distill"](epochs=1, batch_size=16, **options)
    student = run_stage(compress.run, method, model=talker, teacher=talker, data=conversations)
    [row] = json.loads(student.file("history.json").read_text())
    assert row["loss"] < 1  # a teacher's own divergence from itself is 0, the rest is a tenth of the data's
    assert student.spec.quality["perplexity"] < 1.05 * talker.spec.quality["perplexity"]


def test_a_reply_is_a_line_that_fits(engine: Engine) -> None:
    task = task_of(engine.spec.task)
    runs = Onnx().load(engine.path, engine.spec, threads=1)
    said = ["hello", "how are you?\nfine", "a long story " * 50]
    reply = task.reply(runs, engine.path, said, beams=1, max_tokens=5)
    assert reply == task.reply(runs, engine.path, said, beams=1, max_tokens=5) and "\n" not in reply
    with pytest.raises(ConfigInvalid, match="beam"):
        task.reply(runs, engine.path, said, beams=2, max_tokens=5)


def test_onnxruntime_genai_generates_the_same(engine: Engine) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    task = task_of(engine.spec.task)
    prompt = np.load(Path(engine.path, "golden_prefill_input_ids.npy"))[:1, :8]
    model = genai.Model(str(engine.path))
    assert list(genai.Tokenizer(model).encode("hello, how are you?")) == [
        *_encoded(engine, "hello, how are you?")
    ]
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=task.context, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(prompt.astype(np.int32))
    generated: list[int] = []
    while not generator.is_done() and len(generated) < 10:
        generator.generate_next_token()
        generated.append(int(generator.get_next_tokens()[0]))
    runs = Onnx().load(engine.path, engine.spec, threads=1)
    assert generated == greedy(runs, prompt, 10)[0, : len(generated)].tolist()


def _encoded(engine: Engine, text: str) -> list[int]:
    from hpml.tasks.language_modeling.tokenizer import encoded, load_tokenizer

    return encoded(load_tokenizer(engine.file("tokenizer.json")), [text])[0]
