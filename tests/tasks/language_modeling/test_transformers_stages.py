"""A folder of transformers through the stages: its tokenizer, its weights, trained on or not, its engines."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import METHODS
from hpml.components.compress import stage as compress
from hpml.components.export import stage as export
from hpml.components.prepare import stage as prepare
from hpml.components.train import stage as train
from hpml.components.train.config import TrainConfig
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.targets.onnx import Onnx
from hpml.tasks import task_of
from hpml.tasks.language_modeling.cache import greedy
from hpml.tasks.language_modeling.sources import Chitchat, Text
from hpml.tasks.language_modeling.tokenizer import encoded, load_tokenizer
from tests.conftest import RunStage
from tests.tasks.language_modeling.model_folders import IDS, TOKENS, library_model, tokenizer, write_folder

Data, Model, Engine = Artifact[DatasetSpec], Artifact[ModelSpec], Artifact[EngineSpec]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def data(folder: Path, run_stage_once: RunStage) -> Data:
    return run_stage_once(prepare.run, Chitchat(conversations=40, context=32, tokenizer=folder))


def training(folder: Path, **options: Any) -> TrainConfig:
    return TrainConfig(model={"architecture": "transformers"}, weights=folder, **{"epochs": 0, **options})


@pytest.fixture(scope="module")
def as_it_is(folder: Path, data: Data, run_stage_once: RunStage) -> Model:
    """Made where no connection can be."""

    def refuse(*_arguments: object) -> NoReturn:
        raise AssertionError("something wants a network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        return run_stage_once(train.run, training(folder), data=data)


@pytest.fixture(scope="module")
def engine(data: Data, as_it_is: Model, run_stage_once: RunStage) -> Engine:
    return run_stage_once(export.run, Onnx(), model=as_it_is, data=data)


# -------------------------------------------------------------------------------------------- the tokenizer


def test_texts_are_in_the_models_own_tokens(folder: Path, data: Data) -> None:
    task = task_of(data.spec.task)
    assert (task.vocabulary_size, task.end_id, task.begin_ids) == (IDS, 0, ())
    assert data.file("tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    tokens = np.load(data.file("train_tokens.npy"))
    assert tokens.max() < TOKENS and (tokens == 0).any()


def test_what_its_file_says_of_lengths_and_beginnings(tmp_path: Path, run_stage: RunStage) -> None:
    """Texts are not cut or padded, as it may ask for; what it puts before a text is there, also in a chat."""
    own = tokenizer()
    begin = own.token_to_id("a")
    own.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", begin)])
    own.enable_truncation(4)
    own.enable_padding(length=4)
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": IDS, "eos_token_id": [5, 6]}))
    lines = [f"the number {n} is a number that many do not know" for n in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    source = Text(path=tmp_path / "a.txt", unit="line", context=8, tokenizer=tmp_path / "tokenizer.json")
    data = run_stage(prepare.run, source)
    task = task_of(data.spec.task)
    assert (task.begin_ids, task.end_id) == ((begin,), 5)
    tokens = np.load(data.file("train_tokens.npy"))
    [ends] = np.nonzero(tokens == 5)
    assert tokens[0] == begin and (tokens[ends[:-1] + 1] == begin).all() and np.diff(ends).min() > 10

    prompts: list[list[int]] = []

    class EndsAtOnce:
        @property
        def operations(self) -> dict[str, Any]:
            return {one.name: one for one in task.operations(library_network())}

        def run(self, feeds: Any, _operation: str = "") -> dict[str, Any]:
            prompts.append(feeds["input_ids"][0].tolist())
            logits = np.zeros((1, 1, IDS), np.float32)
            logits[..., task.end_id] = 1
            return {"logits": logits}

    assert task.reply(EndsAtOnce(), data.path, ["hi"], beams=1, max_tokens=2) == ""
    [expected] = encoded(load_tokenizer(data.file("tokenizer.json")), ["hi\n"])
    assert prompts == [[begin, *expected]]


def library_network() -> Any:
    from hpml.models.transformers_decoder import TransformersDecoder

    config = json.loads(library_model("llama").config.to_json_string())
    return TransformersDecoder(vocabulary_size=IDS, context=8, **config)


def test_a_tokenizer_that_does_not_say_its_end_is_told_it(
    folder: Path, tmp_path: Path, run_stage: RunStage
) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigInvalid, match="does not say which it is"):
        run_stage(prepare.run, Chitchat(conversations=40, context=32, tokenizer=tmp_path))
    with pytest.raises(ConfigInvalid, match="'</s>' is not one of its tokens"):
        run_stage(prepare.run, Chitchat(conversations=40, context=32, tokenizer=tmp_path, end_token="</s>"))
    source = Chitchat(conversations=40, context=32, tokenizer=tmp_path, end_token="<|endoftext|>")
    task = task_of(run_stage(prepare.run, source).spec.task)
    assert (task.vocabulary_size, task.end_id) == (TOKENS, 0)  # no config.json says of more


def test_tokens_that_the_model_does_not_know_are_refused(
    folder: Path, tmp_path: Path, run_stage: RunStage
) -> None:
    shutil.copytree(folder, tmp_path / "smaller")
    (tmp_path / "smaller" / "config.json").write_text(json.dumps({"vocab_size": 270}))
    with pytest.raises(StageFailed, match="the model beside it knows 270"):
        run_stage(prepare.run, Chitchat(conversations=40, context=32, tokenizer=tmp_path / "smaller"))


def test_its_vocabulary_is_not_set_twice(folder: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary_size is that of the tokenizer"):
        Chitchat(tokenizer=folder, vocabulary_size=400)
    with pytest.raises(ValueError, match="end_token is of a tokenizer"):
        Chitchat(end_token="</s>")


# ------------------------------------------------------------------------------------------------ the network


def test_without_an_epoch_it_is_what_the_library_loads(folder: Path, data: Data, as_it_is: Model) -> None:
    """Its perplexity, computed by the library's own loss."""
    stored = task_of(data.spec.task).stored(data, "validation")["tokens"].astype("int64")
    windows = torch.from_numpy(np.array(stored))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = float(theirs(input_ids=windows, labels=windows).loss)
    assert as_it_is.spec.quality["perplexity"] == pytest.approx(np.exp(loss), rel=1e-3)
    assert as_it_is.spec.architecture.arguments["model_type"] == "llama"
    assert as_it_is.spec.parameters == sum(one.numel() for one in theirs.parameters())


def test_where_weights_are_from_is_recorded(
    folder: Path, data: Data, engine: Engine, run_stage: RunStage
) -> None:
    origin = engine.spec.origin
    assert origin is not None and (origin.source, origin.licence) == ("llama", "not stated")
    assert {"config.json", "model.safetensors.index.json"} < set(origin.sha256)
    card = "---\nlanguage: en\nlicense: apache-2.0\n---\n# Llama\nlicense: mine\n"
    (folder / "README.md").write_text(card)
    try:
        read = run_stage(train.run, training(folder), data=data).spec.origin
        said = run_stage(train.run, training(folder, weights_licence="MIT"), data=data).spec.origin
    finally:
        (folder / "README.md").unlink()
    assert read is not None and read.licence == "apache-2.0" and said is not None and said.licence == "MIT"


def test_an_epoch_makes_it_better(folder: Path, data: Data, as_it_is: Model, run_stage: RunStage) -> None:
    options = {"optimizer": "adamw", "learning_rate": 0.01, "label_smoothing": 0, "batch_size": 16}
    tuned = run_stage(train.run, training(folder, epochs=1, **options), data=data)
    assert tuned.spec.quality["perplexity"] < 0.7 * as_it_is.spec.quality["perplexity"]


def test_data_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path, run_stage: RunStage) -> None:
    """Of as many tokens, too: the network would read noise."""
    other = run_stage(prepare.run, Chitchat(conversations=40, context=32, vocabulary_size=IDS))
    with pytest.raises(ConfigInvalid, match="another tokenizer than the model's"):
        run_stage(train.run, training(folder), data=other)


def test_weights_that_are_not_the_networks_are_refused(folder: Path, data: Data, tmp_path: Path) -> None:
    from hpml.models.transformers_decoder import TransformersDecoder
    from hpml.training import pretrained

    def load(**changed: Any) -> None:
        given = pretrained.architecture_of(folder, changed).arguments
        pretrained.load_into(TransformersDecoder(vocabulary_size=IDS, context=32, **given), folder)

    with pytest.raises(ConfigInvalid, match=r"9 missing: model.layers.2.input_layernorm.weight"):
        load(num_hidden_layers=3)
    with pytest.raises(ConfigInvalid, match=r"9 unexpected: model.layers.1"):
        load(num_hidden_layers=1)
    with pytest.raises(ConfigInvalid, match=r"cannot be loaded|of another shape"):
        load(intermediate_size=48)
    broken = library_model("llama")
    broken.lm_head.weight.data[3, 3] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    folder = tmp_path / "broken"
    with pytest.raises(ConfigInvalid, match=r"are not finite: lm_head.weight"):
        load()


# ------------------------------------------------------------------------------------------------ the engines


def test_an_engine_answers_and_continues_as_its_network(
    engine: Engine, as_it_is: Model, folder: Path
) -> None:
    spec = engine.spec
    assert spec.status == "built" and spec.agreement == 1 and spec.generation_agreement == 1
    assert spec.quality["perplexity"] == pytest.approx(as_it_is.spec.quality["perplexity"], rel=1e-4)
    runs = Onnx().load(engine.path, spec, threads=1)
    prompt = np.random.default_rng(0).integers(0, IDS, (2, 7))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = theirs.generate(torch.from_numpy(prompt), max_new_tokens=6, do_sample=False, eos_token_id=IDS)
    assert greedy(runs, prompt, 6).tolist() == generated[:, 7:].tolist()


def test_keys_and_values_have_fewer_heads_than_queries(engine: Engine) -> None:
    graph = onnx.load(engine.file("model.onnx")).graph
    shapes = {
        one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
        for one in (*graph.input, *graph.output)
    }
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past", 4]
    assert shapes["attention_mask"] == ["batch", "past + sequence"] and len(shapes) == 2 + 4 + 1 + 4
    decoder = json.loads(engine.file("genai_config.json").read_text())["model"]["decoder"]
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"]) == (4, 2)


def test_int8_is_of_all_layers(data: Data, as_it_is: Model, run_stage: RunStage) -> None:
    method = METHODS["quantize"](calibration_samples=32)
    model = run_stage(compress.run, method, model=as_it_is, teacher=as_it_is, data=data)
    target = Onnx(tolerance={"min_agreement": 0.5})  # of few windows, and random weights
    engine = run_stage(export.run, target, model=model, data=data)
    assert engine.spec.precision == "int8" and engine.spec.origin == as_it_is.spec.origin
    nodes = onnx.load(engine.file("model.onnx")).graph.node
    assert Counter(node.op_type for node in nodes)["QuantizeLinear"] == 2 * 4 + 1  # q, k and v share an input
    assert engine.spec.quality["perplexity"] == pytest.approx(as_it_is.spec.quality["perplexity"], rel=0.05)


def test_gpt2_with_one_matrix_for_embedding_and_head(tmp_path: Path, run_stage: RunStage) -> None:
    folder = write_folder(tmp_path / "gpt2", "gpt2", n_positions=32)
    data = run_stage(prepare.run, Chitchat(conversations=40, context=32, tokenizer=folder))
    model = run_stage(train.run, training(folder), data=data)
    engine = run_stage(export.run, Onnx(), model=model, data=data)
    assert engine.spec.agreement == 1 and engine.spec.generation_agreement == 1


def test_onnxruntime_genai_generates_the_same(engine: Engine) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(engine.path))
    text = "hello, how are you?"
    [expected] = encoded(load_tokenizer(engine.file("tokenizer.json")), [text])
    assert list(genai.Tokenizer(model).encode(text)) == expected
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=32, do_sample=False)
    generator = genai.Generator(model, parameters)
    prompt = np.array([expected], np.int64)
    generator.append_tokens(prompt.astype(np.int32))
    generated: list[int] = []
    while not generator.is_done() and len(generated) < 10:
        generator.generate_next_token()
        generated.append(int(generator.get_next_tokens()[0]))
    runs = Onnx().load(engine.path, engine.spec, threads=1)
    assert generated == greedy(runs, prompt, 10)[0, : len(generated)].tolist()
