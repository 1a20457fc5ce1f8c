"""Small random models of transformers with their tokenizers, in folders as save_pretrained writes them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hpml.data_files import chitchat
from hpml.tasks.language_modeling.tokenizer import END, train_tokenizer

TOKENS, IDS = 300, 304  # networks have logits for some more ids than there are tokens, as published ones do
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": LLAMA | {"sliding_window": 3},
    "gpt2": {"n_embd": 16, "n_head": 4},
}


def library_model(family: str, **options: Any) -> PreTrainedModel:
    """A random model of two layers, as the library makes it."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    sizes = {"vocab_size": IDS, "num_hidden_layers": 2, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, **FAMILIES.get(family, LLAMA) | sizes | ends | options)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def tokenizer() -> Tokenizer:
    """A tokenizer of some conversations."""
    return train_tokenizer(["\n".join(turns) for turns in islice(chitchat.conversations(), 60)], TOKENS)


def write_folder(folder: Path, family: str = "llama", **options: Any) -> Path:
    """A model and its tokenizer in `folder`, which is returned; weights in shards, except GPT-2's."""
    library_model(family, **options).save_pretrained(
        folder, safe_serialization=True, max_shard_size="5GB" if family == "gpt2" else "16KB"
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END).save_pretrained(folder)
    return folder
