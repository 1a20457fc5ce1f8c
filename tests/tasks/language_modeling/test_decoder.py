"""The decoder: causal, the same with a cache as without, the same with padding, tied for good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.core.errors import ConfigInvalid
from hpml.models.decoder import Decoder
from hpml.tasks.language_modeling.cache import CacheShape
from hpml.tasks.language_modeling.task import LanguageModeling

VOCABULARY, CONTEXT = 50, 12
TASK = LanguageModeling(vocabulary_size=VOCABULARY, context=CONTEXT, end_id=0)


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocabulary_size=VOCABULARY, context=CONTEXT, dim=16, depth=2, heads=2).eval()


def ids(rows: int = 2, count: int = CONTEXT) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_no_place_sees_those_after_it(decoder: Decoder) -> None:
    one, other = ids(), ids()
    other[:, 7:] = (other[:, 7:] + 1) % VOCABULARY
    differs = (decoder(one) != decoder(other)).any(dim=2).any(dim=0)
    assert differs.tolist() == [False] * 7 + [True] * 5


@torch.no_grad()
def test_with_a_cache_it_answers_as_without(decoder: Decoder) -> None:
    tokens = ids()
    empty = [torch.zeros(2, 2, 0, 8)] * 4
    logits, *cache = decoder(tokens[:, :5], torch.ones(2, 5, dtype=torch.int64), *empty)
    found = [logits]
    for begin, end in ((5, 6), (6, 9), (9, CONTEXT)):
        logits, *cache = decoder(tokens[:, begin:end], torch.ones(2, end, dtype=torch.int64), *cache)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), decoder(tokens), atol=1e-5, rtol=1e-5)
    assert all(one.shape == (2, 2, CONTEXT, 8) for one in cache)


@torch.no_grad()
def test_padding_before_a_prompt_changes_nothing(decoder: Decoder) -> None:
    tokens = ids(1, 6)
    padded = torch.cat([torch.full((1, 3), 7), tokens], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    logits, *_ = decoder(padded, mask, *[torch.zeros(1, 2, 0, 8)] * 4)
    torch.testing.assert_close(logits[:, 3:], decoder(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padding_behind_a_prompt_changes_nothing_of_what_follows(decoder: Decoder) -> None:
    tokens = ids(1, 8)
    padded = torch.cat([tokens[:, :5], torch.full((1, 3), 7)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    logits, *cache = decoder(padded, mask, *[torch.zeros(1, 2, 0, 8)] * 4)
    longer = torch.cat([mask, torch.ones(1, 3, dtype=torch.int64)], dim=1)
    following, *_ = decoder(tokens[:, 5:], longer, *cache)
    found = torch.cat([logits[:, :5], following], dim=1)
    torch.testing.assert_close(found, decoder(tokens), atol=1e-5, rtol=1e-5)


def test_head_and_embedding_are_one_after_saving_and_loading(decoder: Decoder, tmp_path: Path) -> None:
    models.save(decoder, tmp_path)
    architecture = ArchitectureSpec(name="decoder", arguments={"dim": 16, "depth": 2, "heads": 2})
    loaded = models.load_weights(models.build(architecture, TASK), tmp_path / models.WEIGHTS)
    assert loaded.head.weight is loaded.embedding.weight
    torch.testing.assert_close(loaded(ids()), decoder(ids()))
    loaded.head.weight.data.zero_()
    assert not loaded.embedding.weight.any()


def test_it_counts_the_shared_matrix_once(decoder: Decoder) -> None:
    parameters, macs = models.count(decoder, TASK)
    assert parameters == VOCABULARY * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 48 + 2 * 16) + 16
    layers = parameters - 5 * 16  # the norms multiply no matrices
    assert macs == CONTEXT * layers + 2 * 2 * CONTEXT * CONTEXT * 16  # attention: two products a block


@pytest.mark.parametrize("arguments", [{"dim": 15}, {"dim": 16, "heads": 16}, {"depth": 0}])
def test_sizes_that_cannot_be_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigInvalid, match="cannot build the model"):
        models.build(ArchitectureSpec(name="decoder", arguments=arguments), TASK)


def test_a_network_without_a_cache_is_told_what_is_missing() -> None:
    with pytest.raises(ConfigInvalid, match="cache_shape"):
        TASK.operations(torch.nn.Linear(2, 2))


def test_operations_are_named_as_generators_name_them(decoder: Decoder) -> None:
    assert decoder.cache_shape == CacheShape(layers=2, heads=2, head_size=8)
    decode, prefill = TASK.operations(decoder)
    names = [f"past_key_values.{layer}.{what}" for layer in (0, 1) for what in ("key", "value")]
    assert [one.name for one in decode.inputs] == ["input_ids", "attention_mask", *names]
    assert [one.name for one in prefill.outputs][:2] == ["logits", "present.0.key"]
