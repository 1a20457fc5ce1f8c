"""Architectures, and how a network is built from a manifest, saved and loaded.

A network is its architecture, then its channel plan (the sizes that pruning left), then its weights. An
architecture is an import path of a callable that takes what its task says of the data (`in_channels` and
`num_classes` of images) beside its own arguments, and returns a torch module that takes the task's features.
Ours have a short name, a row of ARCHITECTURES; a user's own is given as `package.module:callable`.
Importing this package does not import torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.models.arguments import require_types
from hpml.tasks import Task, task_of
from hpml.tasks.users_code import BUILD_S, time_limit, users_code

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import Tensor, nn

ARCHITECTURES: dict[str, str] = {
    "cnn": "hpml.models.cnn:Cnn",
    "decoder": "hpml.models.decoder:Decoder",
    "resnet18": "hpml.models.resnet:ResNet18",
    "vit": "hpml.models.vit:Vit",
    "gru_attention": "hpml.models.gru_attention:GruAttention",
    "encoder_decoder": "hpml.models.encoder_decoder:EncoderDecoder",
    "transformers": "hpml.models.transformers_decoder:TransformersDecoder",
}
EXTRAS: dict[str, str] = {
    "transformers": "transformers"
}  # the extra, and package, that an architecture needs

WEIGHTS = "model.safetensors"


def import_path(name: str) -> str:
    """The import path of an architecture.

    Raises ConfigInvalid for a name that is neither ours nor an import path.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if ":" in name:
        return name
    near = difflib.get_close_matches(name, ARCHITECTURES, n=1)
    hint = f"{f'did you mean {near[0]!r}? ' if near else ''}ours are {', '.join(ARCHITECTURES)}"
    raise ConfigInvalid(
        f"there is no architecture {name!r}", why=hint, fix="your own is given as package.module:callable"
    )


def factory(name: str) -> Callable[..., Any]:
    """The callable of an architecture.

    Raises ConfigInvalid if it cannot be imported, takes too long, or is something else.
    """
    path = import_path(name)
    module_name, _, attribute = path.partition(":")
    may_not_be_found = users_code(
        f"cannot import the model {path!r}",
        fix="check the spelling; modules are looked for beside the recipe",
    )
    with may_not_be_found, time_limit(BUILD_S, f"importing {module_name}"):
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    if not callable(found):
        raise ConfigInvalid(f"the model {path!r} is not callable", why=f"its type is {type(found).__name__}")
    return found


def missing(name: str) -> str:
    """What is not installed that an architecture needs, and how to install it; empty if nothing."""
    package = EXTRAS.get(name)
    if package is None or importlib.util.find_spec(package):
        return ""
    return f"the package {package} is not installed: pip install 'hpml-pipeline[{package}]'"


def build(architecture: ArchitectureSpec, task: Task) -> nn.Module:
    """A freshly initialised network for the data that `task` tells of.

    Raises ConfigInvalid if its module, its callable or its arguments are wrong, if it does not fit into
    memory, or if its code does not end.
    """
    return build_of(architecture, task.model_arguments())


def build_of(architecture: ArchitectureSpec, of_data: Mapping[str, JsonValue]) -> nn.Module:
    """The same, where what it is given of the data is known. Raises as `build`."""
    from torch import nn

    from hpml.models.limits import memory_limit, require_fits

    if problem := missing(architecture.name):
        raise ConfigInvalid(f"the model {architecture.name} cannot be built", why=problem)
    path, what = import_path(architecture.name), f"the model {architecture.name}"
    make_network = factory(architecture.name)
    require_types(path, make_network, architecture.arguments)
    may_not_fit = users_code(
        f"cannot build the model {path!r}",
        fix=f"check its arguments; it is also given {' and '.join(of_data)}"
        if of_data
        else "check its arguments",
    )
    with may_not_fit, time_limit(BUILD_S, f"building {what}"), memory_limit(what):

        def make() -> nn.Module:
            network: nn.Module = make_network(**of_data, **architecture.arguments)
            return network

        if architecture.name in ARCHITECTURES:
            require_fits(what, make)
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigInvalid(f"{path!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def rebuild(spec: ModelSpec) -> nn.Module:
    """The network of a manifest, channel plan applied, weights not yet loaded."""
    task = task_of(spec.task)
    model = materialise(build(spec.architecture, task), task)
    if spec.channel_plan:
        from hpml.models.channel_plan import apply_channel_plan

        apply_channel_plan(model, spec.channel_plan)
    return model


def materialise(model: nn.Module, task: Task) -> nn.Module:
    """`model`, the sizes of its lazy layers (nn.LazyLinear and so on) found with a row, in place."""
    import torch
    from torch.nn.parameter import is_lazy

    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        was_training = model.training
        with torch.no_grad():
            model.eval()(*task.example(1))
        model.train(was_training)
    return model


def load(artifact: Artifact[ModelSpec]) -> nn.Module:
    """The trained network of a model artifact, in evaluation mode, on the CPU."""
    return load_weights(rebuild(artifact.spec), artifact.file(WEIGHTS)).eval()


def load_weights(model: nn.Module, file: Path) -> nn.Module:
    """`model` with the weights of `file`.

    Raises StageFailed if names or shapes differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StageFailed(f"the weights in {file} do not fit the network", why=reason) from None
    return model


def save(model: nn.Module, folder: Path) -> None:
    """Write the weights of `model` into `folder`."""
    from safetensors.torch import save_file

    save_file(copied(model.state_dict()), folder / WEIGHTS)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` for a file of safetensors: two names may share one, and the file holds each on its own."""
    import torch

    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def count(model: nn.Module, task: Task) -> tuple[int, int]:
    """Parameters, and multiply-accumulates of one row, of `model`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    # Attention as plain matrix products: the counter knows no formula for the CPU's fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*(tensor.to(device) for tensor in task.example(1)))
    model.train(was_training)
    return parameters, counter.get_total_flops() // 2
