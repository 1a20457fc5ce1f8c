"""A network that begins with a model's folder of the `transformers` library: its config and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec
from hpml.core import regular_files
from hpml.core.contract import Output, validate
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.data_files import model_folder
from hpml.data_files.model_folder import CONFIG, TOKENIZER
from hpml.training.weights import listed

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURE = "transformers"


def architecture_of(folder: Path, arguments: Mapping[str, JsonValue]) -> ArchitectureSpec:
    """The network of the folder; `arguments` take the place of fields of its config.

    Raises ConfigInvalid if the folder cannot be used.
    """
    if problem := model_folder.network_problem(folder):
        raise ConfigInvalid("the model cannot be used", why=problem)
    config = model_folder.read_json(folder / CONFIG)
    described = {"name": ARCHITECTURE, "arguments": {**config, **arguments}}
    spec: ArchitectureSpec = validate(ArchitectureSpec, described, where=str(folder / CONFIG))
    return spec


def require_own_tokenizer(folder: Path, data: Artifact[DatasetSpec], out: Output) -> None:
    """Raise ConfigInvalid unless the tokens of `data` are those that the model in `folder` knows."""
    if regular_files.problem(folder / TOKENIZER):
        out.note(f"there is no {TOKENIZER} beside the weights: that the data has the model's was not checked")
    elif data.file(TOKENIZER).read_bytes() != (folder / TOKENIZER).read_bytes():
        raise ConfigInvalid(
            "the data was made with another tokenizer than the model's",
            why=f"its {TOKENIZER} is not the one beside the weights",
            fix="set data.tokenizer to the model's folder, too",
        )


def load_into(model: nn.Module, folder: Path) -> None:
    """Give `model`, a TransformersDecoder, the weights in the folder of its config, in fp32.

    Raises ConfigInvalid if they cannot be read, are not those of the network, or are not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from hpml.models.transformers_decoder import TransformersDecoder

    assert isinstance(model, TransformersDecoder)
    disable_progress_bar()
    try:
        network, told = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model.network.config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except HpmlError:  # a signal's
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the library, of safetensors, or of torch
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigInvalid(f"the weights in {folder} cannot be loaded", why=why) from None
    kinds = {
        "missing": told["missing_keys"],
        "unexpected": told["unexpected_keys"],
        "of another shape": [str(name) for name, *_ in told["mismatched_keys"]],
    }
    problems = [f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names]
    if problems:
        raise ConfigInvalid(f"the weights in {folder} are not those of the network", why="; ".join(problems))
    broken = [name for name, tensor in network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigInvalid(f"weights in {folder} are not finite", why=listed(broken))
    model.adopt(network)
