"""A language model of the `transformers` library, by its config: Llama, Qwen, Mistral, GPT-2, ...

The library's own classes compute it, and its config, the content of config.json, is the arguments: so a
manifest rebuilds the network without the folder that it came from. Code that comes with a model is never run.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers import __version__ as version
from transformers import logging as library_log
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hpml.core.errors import ConfigInvalid
from hpml.tasks.language_modeling.cache import CacheShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

library_log.set_verbosity_error()  # it warns of token ids and kernels that are not used here

MOST_LAYERS = 1000
# Of where a config came from, and how its weights were stored or computed: nothing of the network.
_OF_ORIGIN = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}
_OF_ORIGIN |= {"_attn_implementation", "attn_implementation", "use_cache"}


class TransformersDecoder(nn.Module):
    """`network`, a model for causal language modeling, with the inputs and outputs of our decoder.

    attention_heads: of the queries; `cache_shape` has those of keys and values, which may be fewer.
    """

    def __init__(self, *, vocabulary_size: int, context: int, **config: Any) -> None:
        """config: the fields of config.json, `model_type` among them.

        Raises ConfigInvalid if the library has no such model, if the network's vocabulary is not that of the
        data, if it cannot look back `context` tokens, keeps no keys and values, or looks ahead, or if it is a
        mixture of experts, which is not exported.
        """
        super().__init__()
        described = _config(config, vocabulary_size)
        _require_fit(described.get_text_config(), vocabulary_size, context)
        self.context = context
        self.adopt(AutoModelForCausalLM.from_config(described, trust_remote_code=False))
        if set(self.network.get_experts_implementation().values()) != {"eager"}:
            raise _not_offered(described.model_type, "its layers are mixtures of experts")
        self.cache_shape = _cache_shape(self.network, described.model_type)
        _require_causal(self.network, described.model_type)
        self.attention_heads = int(
            getattr(described.get_text_config(), "num_attention_heads", self.cache_shape.heads)
        )

    def adopt(self, network: PreTrainedModel) -> None:
        """Take `network`, of the same config, in the place of the one that is here."""
        self.network = with_linear_layers(network).train(self.training)
        self._takes_positions = "position_ids" in inspect.signature(network.forward).parameters

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *past: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """As `hpml.models.decoder.Decoder.forward`; positions are counted from the first token of a row."""
        if attention_mask is None:
            alone: Tensor = self.network(input_ids=input_ids, use_cache=False).logits
            return alone
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        more: dict[str, Any] = {}
        if self._takes_positions:
            positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
            more["position_ids"] = positions[:, -input_ids.shape[1] :]
        answer = self.network(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more
        )
        present = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (answer.logits, *present)


def _config(given: dict[str, Any], vocabulary_size: int) -> PretrainedConfig:
    fields = {name: value for name, value in given.items() if name not in _OF_ORIGIN}
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigInvalid(
            "the model of transformers is not named",
            fix="set train.weights to its folder, or train.model.arguments.model_type, such as llama",
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigInvalid(
            f"transformers {version} has no language model of the type {str(model_type)[:60]!r}",
            why="it has to predict each token from those before; code that comes with a model is not run",
            fix="give a model of another type, or install a version of transformers that knows this one",
        )
    if "text_config" not in fields:
        fields.setdefault("vocab_size", vocabulary_size)
    config: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config


def _require_fit(config: PretrainedConfig, vocabulary_size: int, context: int) -> None:
    if config.vocab_size != vocabulary_size:
        raise ConfigInvalid(
            f"the network has {config.vocab_size:,} token ids, the data set has {vocabulary_size:,}",
            why="a network knows the tokens of its own tokenizer only",
            fix="set data.tokenizer to the model's folder, too",
        )
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and context > most:
        raise ConfigInvalid(
            f"the network looks back {most:,} tokens, data.context is {context:,}", fix="lower data.context"
        )
    layers = getattr(config, "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise ConfigInvalid(f"num_hidden_layers is {layers}", why=f"from 1 to {MOST_LAYERS} are allowed")


def with_linear_layers(network: PreTrainedModel) -> PreTrainedModel:
    """`network` with GPT-2's Conv1D, which stores the weights of a linear layer transposed, as nn.Linear.

    In place: what knows linear layers (quantization, Muon) then knows these.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, Conv1D):
            inputs, outputs = layer.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
            linear.bias = layer.bias
            network.set_submodule(name, linear)
    return network


@torch.no_grad()
def _cache_shape(network: PreTrainedModel, model_type: str) -> CacheShape:
    """What it keeps of a token, seen rather than read: configs spell it in many ways."""
    was_training, cache = network.training, DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(network.parameters()).device)
    why = "engines have keys and values of one shape for every layer, and it does not keep such"
    try:
        network.eval()(input_ids=token, past_key_values=cache, use_cache=True)
    except Exception as error:  # whatever it raises that wants a cache of another kind
        why = f"{why} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    network.train(was_training)
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    shapes = {None if tensor is None else tuple(tensor.shape) for tensor in kept}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or len(shape) != 4:
        raise _not_offered(model_type, why)
    return CacheShape(layers=len(cache.layers), heads=shape[1], head_size=shape[3])


@torch.no_grad()
def _require_causal(network: PreTrainedModel, model_type: str) -> None:
    """Raise ConfigInvalid if what is predicted after a token depends on the one that follows, as in BERT."""
    was_training, device = network.training, next(network.parameters()).device
    if device.type == "meta":
        return
    pairs = torch.tensor([[0, 0], [0, 1]], device=device)
    after_first = network.eval()(input_ids=pairs, use_cache=False).logits[:, 0]
    network.train(was_training)
    if not torch.allclose(
        after_first[0], after_first[1], rtol=1e-4, atol=1e-4 * float(after_first.abs().max())
    ):
        raise _not_offered(model_type, "what it predicts after a token depends on those that follow")


def _not_offered(model_type: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"a {model_type} cannot be used as a language model here",
        why=why,
        fix="give a decoder with plain attention, such as llama, qwen3, mistral or gpt2",
    )
