"""A network of the `transformers` library as that library keeps it: a folder with config and weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from hpml.core.errors import StageFailed
from hpml.models.transformers_decoder import TransformersDecoder

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 16  # that the written network is asked for
_TOLERANCE = 1e-4  # of the largest logit: a layer as the library stores it may add in another order


@torch.no_grad()
def write_folder(decoder: TransformersDecoder, end_id: int, folder: Path) -> None:
    """Write `config.json`, `generation_config.json` and the weights in safetensors, fp32, into `folder`.

    end_id: the token that ends a text. `decoder` is of no use afterwards.
    Raises StageFailed if the library does not load the same network from it.
    """
    disable_progress_bar()
    network = decoder.network
    for config in (network.config, network.generation_config):
        config.eos_token_id = end_id
    tokens = torch.arange(_TOKENS)[None, : decoder.context] % network.config.get_text_config().vocab_size
    expected: Tensor = network(input_ids=tokens, use_cache=False).logits
    network.save_pretrained(folder, state_dict=_as_stored(decoder))
    del decoder.network, network  # before it is in memory twice
    written = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    found: Tensor = written(input_ids=tokens, use_cache=False).logits
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise StageFailed(
            "transformers does not load the network that was trained from what was written",
            why=f"a logit is off by {error:.2g} of the largest one",
        )


def _as_stored(decoder: TransformersDecoder) -> dict[str, Tensor]:
    """The weights as the library stores them: those of GPT-2's Conv1D, linear layers here, transposed."""
    network = decoder.network
    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(network.config)
    transposed = {f"{name}.weight" for name, layer in own.named_modules() if isinstance(layer, Conv1D)}
    return {
        name: tensor.t().contiguous() if name in transposed else tensor
        for name, tensor in network.state_dict().items()
    }
