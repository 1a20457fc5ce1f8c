"""The key-value cache of a language model as named inputs and outputs, in the names of `onnxruntime-genai`.

A network takes `input_ids` alone and returns logits; or `input_ids`, `attention_mask` and the keys and values
of the positions before, of each layer in turn, and returns logits and the keys and values of all positions.
It tells the sizes of its cache by an attribute `cache_shape`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.errors import ConfigInvalid
from hpml.tasks.base import Arrays, Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from hpml.tasks.generation import Choose

PREFILL, DECODE = "prefill", "decode"
INPUT_IDS, ATTENTION_MASK, LOGITS = "input_ids", "attention_mask", "logits"
PAST, PRESENT = "past_key_values", "present"


class CacheShape(NamedTuple):
    """Of a layer's keys, and of its values: (batch, heads, positions, head_size)."""

    layers: int
    heads: int
    head_size: int


def cache_shape(network: nn.Module) -> CacheShape:
    """What `network` says of its cache. Raises ConfigInvalid if it says nothing."""
    shape = getattr(network, "cache_shape", None)
    if not isinstance(shape, tuple) or len(shape) != len(CacheShape._fields):
        raise ConfigInvalid(
            f"the network {type(network).__name__} does not tell the sizes of its cache",
            why="a language model generates a token at a time, with the keys and values of those before",
            fix="give it an attribute cache_shape = (layers, heads, head_size), and a forward that takes"
            " (input_ids, attention_mask, *past) and returns (logits, *present); see hpml/models/decoder.py",
        )
    return CacheShape(*shape)


def cached_operations(shape: CacheShape, vocabulary_size: int) -> tuple[Operation, ...]:
    """`decode` and `prefill`, of one graph: what they take differs in size only."""
    layers, heads, head_size = shape

    def caches(name: str, positions: str, content: str) -> list[TensorSpec]:
        return [
            TensorSpec(
                name=f"{name}.{layer}.{what}", shape=("batch", heads, positions, head_size), content=content
            )
            for layer in range(layers)
            for what in ("key", "value")
        ]

    def operation(name: str, ids: str, past: str) -> Operation:
        return Operation(
            name=name,
            inputs=(
                TensorSpec(
                    name=INPUT_IDS,
                    dtype="int64",
                    shape=("batch", "sequence"),
                    content=ids,
                    below=vocabulary_size,
                ),
                TensorSpec(
                    name=ATTENTION_MASK,
                    dtype="int64",
                    shape=("batch", "past + sequence"),
                    content="1 for a token, 0 for padding",
                ),
                *caches(PAST, "past", past),
            ),
            outputs=(
                TensorSpec(
                    name=LOGITS, shape=("batch", "sequence", vocabulary_size), content="of the next token"
                ),
                *caches(PRESENT, "past + sequence", "of all positions"),
            ),
        )

    return (
        operation(DECODE, "one token each", "of the positions before"),
        operation(PREFILL, "a prompt each", "empty: 0 positions"),
    )


def prefill(runs: Runs, input_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What `runs` answers to whole prompts (rows, sequence)."""
    return runs.run(prefill_feeds(runs.operations[PREFILL], input_ids), PREFILL)


def prefill_feeds(operation: Operation, input_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The inputs for whole prompts (rows, sequence) without padding: the cache is empty."""
    empty = {
        one.name: np.zeros(one.sizes(batch=len(input_ids), past=0), one.dtype)
        for one in operation.inputs
        if one.name.startswith(f"{PAST}.")
    }
    return {INPUT_IDS: input_ids, ATTENTION_MASK: np.ones_like(input_ids), **empty}


def decode_feeds(input_ids: NDArray[np.int64], answer: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The inputs for the tokens (rows, 1) that follow those of which `answer` was the answer."""
    past = {
        name.replace(PRESENT, PAST, 1): array
        for name, array in answer.items()
        if name.startswith(f"{PRESENT}.")
    }
    positions = next(iter(past.values())).shape[2] + input_ids.shape[1]
    attention_mask = np.ones((len(input_ids), positions), np.int64)
    return {INPUT_IDS: input_ids, ATTENTION_MASK: attention_mask, **past}


def steps(runs: Runs, prompts: NDArray[np.int64], choose: Choose) -> Iterator[NDArray[np.int64]]:
    """The token (rows, 1) chosen after each prompt (rows, sequence), then after that, without an end."""
    answer = prefill(runs, prompts)
    while True:
        step = choose(answer)
        yield step
        answer = runs.run(decode_feeds(step, answer), DECODE)


def greedy(runs: Runs, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """So many likeliest tokens after each prompt (rows, sequence): (rows, steps)."""
    return np.concatenate(list(islice(steps(runs, prompts, likeliest), count)), axis=1)


def likeliest(answer: Arrays) -> NDArray[np.int64]:
    """The likeliest next token of each row, (rows, 1)."""
    return np.asarray(answer[LOGITS][:, -1:].argmax(axis=-1), np.int64)
