"""Networks of transformers behind the inputs and outputs of our decoder, and which cannot be."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.core.errors import ConfigInvalid
from hpml.models.transformers_decoder import TransformersDecoder
from hpml.tasks.language_modeling.task import LanguageModeling
from tests.tasks.language_modeling.model_folders import FAMILIES, IDS, LLAMA, library_model

CONTEXT = 12
TASK = LanguageModeling(vocabulary_size=IDS, context=CONTEXT, end_id=0)


def built(family: str, **options: Any) -> TransformersDecoder:
    """As a manifest's network is built: by the fields of the library's config."""
    config = json.loads(library_model(family, **options).config.to_json_string())
    network = models.build(ArchitectureSpec(name="transformers", arguments=config), TASK)
    assert isinstance(network, TransformersDecoder)
    return network.eval()


def ids(rows: int = 2, count: int = CONTEXT) -> torch.Tensor:
    return torch.randint(0, IDS, (rows, count), generator=torch.Generator().manual_seed(1))


def empty_cache(network: TransformersDecoder, rows: int) -> list[torch.Tensor]:
    layers, heads, head_size = network.cache_shape
    return [torch.zeros(rows, heads, 0, head_size) for _ in range(2 * layers)]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_cache_and_with_padding_it_answers_as_the_library_does(family: str) -> None:
    """Also beyond a window that slides: Mistral's is 3 tokens here."""
    ours, theirs = built(family), library_model(family)
    ours.adopt(theirs)
    tokens = ids()
    expected = library_model(family)(input_ids=tokens).logits
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)

    cache, found = empty_cache(ours, 2), []
    for begin, end in ((0, 5), (5, 6), (6, 9), (9, CONTEXT)):
        logits, *cache = ours(tokens[:, begin:end], torch.ones(2, end, dtype=torch.int64), *cache)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-5)

    padded = torch.cat([torch.full((2, 3), 7), tokens], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * CONTEXT] * 2)
    logits, *_ = ours(padded, mask, *empty_cache(ours, 2))
    torch.testing.assert_close(logits[:, 3:], expected, atol=1e-5, rtol=1e-5)


def test_heads_of_keys_are_told_apart_from_those_of_queries() -> None:
    llama, gpt2 = built("llama"), built("gpt2")
    assert tuple(llama.cache_shape) == (2, 2, 4) and llama.attention_heads == 4
    assert tuple(gpt2.cache_shape) == (2, 4, 4) and gpt2.attention_heads == 4


def test_layers_of_gpt2_are_linear_ones() -> None:
    kinds = {type(module).__name__ for module in built("gpt2").modules()}
    assert "Linear" in kinds and "Conv1D" not in kinds


def test_a_network_from_scratch_takes_the_vocabulary_of_the_data() -> None:
    network = models.build(
        ArchitectureSpec(name="transformers", arguments={"model_type": "llama", **LLAMA}), TASK
    )
    assert network(ids()).shape == (2, CONTEXT, IDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "is not named"),
        ({"model_type": "lama"}, "no language model of the type 'lama'"),
        ({"model_type": "t5"}, "no language model of the type 't5'"),
        ({"model_type": "bert", **LLAMA, "num_hidden_layers": 1}, "depends on those that follow"),
        ({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}, "keys and values of one shape"),
        ({"model_type": "mixtral", **LLAMA, "num_local_experts": 2}, "mixtures of experts"),
        ({"model_type": "llama", **LLAMA, "vocab_size": IDS + 1}, "has 305 token ids, the data set has 304"),
        ({"model_type": "llama", **LLAMA, "max_position_embeddings": 8}, "looks back 8 tokens"),
        ({"model_type": "llama", **LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "llama", **LLAMA, "hidden_size": 2**40}, "does not fit into memory|cannot build"),
        ({"model_type": "llama", **LLAMA, "hidden_size": "wide"}, "cannot build"),
    ],
)
def test_what_is_no_language_model_of_ours_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        models.build(ArchitectureSpec(name="transformers", arguments=arguments), TASK)


def test_code_that_comes_with_a_model_is_not_run() -> None:
    """`auto_map` names a module in the model's folder."""
    named = {"auto_map": {"AutoModelForCausalLM": "theirs--modeling.Evil"}, "architectures": ["Evil"]}
    assert type(built("llama", **named).network).__name__ == "LlamaForCausalLM"
    with pytest.raises(ConfigInvalid, match="code that comes with a model is not run"):
        models.build(ArchitectureSpec(name="transformers", arguments={"model_type": "evil", **named}), TASK)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "transformers" else found(name, *rest),
    )
    with pytest.raises(ConfigInvalid, match=r"pip install 'hpml-pipeline\[transformers\]'"):
        models.build(ArchitectureSpec(name="transformers", arguments={"model_type": "llama"}), TASK)
    assert not models.missing("decoder")
