"""What `onnxruntime-genai` reads beside a `model.onnx` to generate text with it."""

from __future__ import annotations

import json

from hpml.artifacts.operation import Operation
from hpml.tasks.language_modeling.cache import ATTENTION_MASK, INPUT_IDS, LOGITS, PAST, PRESENT


def genai_files(
    operation: Operation,
    *,
    attention_heads: int,
    vocabulary_size: int,
    context: int,
    begin_id: int,
    end_id: int,
    tokenizer_class: str,
) -> dict[str, str]:
    """`genai_config.json` and `tokenizer_config.json` for a graph with the names of `cache`, as texts.

    attention_heads: of the queries; those of keys and values, which may be fewer, the caches tell.
    """
    caches = [one.shape for one in operation.inputs if one.name.startswith(f"{PAST}.")]
    _, cached_heads, _, head_size = caches[0]
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": head_size,
        "num_attention_heads": attention_heads,
        "num_key_value_heads": cached_heads,
        "num_hidden_layers": len(caches) // 2,
        "inputs": {
            "input_ids": INPUT_IDS,
            "attention_mask": ATTENTION_MASK,
            "past_key_names": f"{PAST}.%d.key",
            "past_value_names": f"{PAST}.%d.value",
        },
        "outputs": {
            "logits": LOGITS,
            "present_key_names": f"{PRESENT}.%d.key",
            "present_value_names": f"{PRESENT}.%d.value",
        },
    }
    model = {
        "type": "decoder",
        "vocab_size": vocabulary_size,
        "context_length": context,
        "bos_token_id": begin_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "decoder": decoder,
    }
    search = {"max_length": context, "do_sample": False, "past_present_share_buffer": False}
    tokenizer = {"tokenizer_class": tokenizer_class, "add_prefix_space": False}
    return {
        "genai_config.json": json.dumps({"model": model, "search": search}, indent=1),
        "tokenizer_config.json": json.dumps(tokenizer, indent=1),
    }
