"""Architectures, and how a network is built from a manifest, saved and loaded.

A network is its architecture, then its channel plan (the sizes that pruning left), then its weights. An
architecture is an import path of a callable that takes `in_channels` and `num_classes` beside its own
arguments and returns a torch module from (batch, channels, height, width) to logits (batch, classes). Ours
have a short name, a row of ARCHITECTURES; a user's own is given as `package.module:callable`.
Importing this package does not import torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.artifacts.model_input import InputSpec
from hpml.core.errors import ConfigInvalid, StageFailed

if TYPE_CHECKING:
    from torch import Tensor, nn

ARCHITECTURES: dict[str, str] = {
    "cnn": "hpml.models.cnn:Cnn",
    "resnet18": "hpml.models.resnet:ResNet18",
    "vit": "hpml.models.vit:Vit",
}

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
    hint = f"did you mean {near[0]!r}?" if near else f"ours are {', '.join(ARCHITECTURES)}"
    raise ConfigInvalid(
        f"there is no architecture {name!r}", why=hint, fix="your own is given as package.module:callable"
    )


def build(architecture: ArchitectureSpec, *, in_channels: int, num_classes: int) -> nn.Module:
    """A freshly initialised network.

    Raises ConfigInvalid if its module, its callable or its arguments are wrong, if it does not fit into
    memory, or if its code does not end.
    """
    from torch import nn

    from hpml.models.limits import BUILD_S, memory_limit, require_fits, time_limit, users_code

    path = import_path(architecture.name)
    module_name, _, attribute = path.partition(":")
    what = f"the model {architecture.name}"
    may_not_be_found = users_code(
        f"cannot import the model {path!r}",
        fix="check the spelling; modules are looked for beside the recipe",
    )
    with may_not_be_found, time_limit(BUILD_S, f"importing {module_name}"):
        factory = getattr(importlib.import_module(module_name), attribute)
    may_not_fit = users_code(
        f"cannot build the model {path!r}",
        fix="check its arguments; it is also given in_channels and num_classes",
    )
    with may_not_fit, time_limit(BUILD_S, f"building {what}"), memory_limit(what):

        def make() -> nn.Module:
            network: nn.Module = factory(
                in_channels=in_channels, num_classes=num_classes, **architecture.arguments
            )
            return network

        if architecture.name in ARCHITECTURES:
            require_fits(what, make)
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigInvalid(f"{path!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def rebuild(spec: ModelSpec) -> nn.Module:
    """The network of a manifest, channel plan applied, weights not yet loaded."""
    model = build(spec.architecture, in_channels=spec.input.shape_chw[0], num_classes=len(spec.class_names))
    materialise(model, spec.input)
    if spec.channel_plan:
        from hpml.models.channel_plan import apply_channel_plan

        apply_channel_plan(model, spec.channel_plan)
    return model


def materialise(model: nn.Module, input_spec: InputSpec) -> nn.Module:
    """`model`, the sizes of its lazy layers (nn.LazyLinear and so on) found with an image, in place."""
    import torch
    from torch.nn.parameter import is_lazy

    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        was_training = model.training
        with torch.no_grad():
            model.eval()(torch.zeros(1, *input_spec.shape_chw))
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


def count(model: nn.Module, input_spec: InputSpec) -> tuple[int, int]:
    """Parameters, and multiply-accumulates of one sample, of `model`."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    # Attention as plain matrix products: the counter knows no formula for the CPU's fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *input_spec.shape_chw, device=device))
    model.train(was_training)
    return parameters, counter.get_total_flops() // 2
