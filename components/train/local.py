"""What one training process does: build the network, check that it fits the images, train, write."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec, WeightsOrigin
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Output, Result
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.data_files import model_folder
from hpml.tasks import Task, task_of
from hpml.tasks.users_code import BUILD_S, time_limit
from hpml.training import pretrained, weights
from hpml.training.loop import fit


def train(config: TrainConfig, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]:
    """Train in this process (one of a group, where it was started so) and write the model into `out.path`."""
    task = task_of(data.spec.task)
    check_required(config.required, task)
    torch.manual_seed(config.seed)
    model, architecture, origin = _to_begin_with(config, task, data, out)

    fitted = fit(model, data, config, out)

    models.save(fitted.model, out.path)
    (out.path / "history.json").write_text(json.dumps(fitted.history, indent=1))
    parameters, macs = models.count(fitted.model, task)
    spec = ModelSpec(
        architecture=architecture,
        task=data.spec.task,
        operations=task.operations(fitted.model),
        origin=origin,
        parameters=parameters,
        macs=macs,
        quality=dict(fitted.quality),
    )
    metrics = {**fitted.metrics, "parameters": parameters, "macs": macs}
    return Result(spec, metrics, _missed(config.required, task, fitted.quality))


def _to_begin_with(
    config: TrainConfig, task: Task, data: Artifact[DatasetSpec], out: Output
) -> tuple[nn.Module, ArchitectureSpec, WeightsOrigin | None]:
    """The network before its training: at random, or with the weights that the config names."""
    folder = config.weights_folder
    if folder is None:
        architecture = ArchitectureSpec(name=config.model.architecture, arguments=config.model.arguments)
        model = _built(architecture, task)
        if config.weights is None:
            return model, architecture, None
        digest = weights.load_into(model, config.weights, out)
        return model, architecture, _origin(config, {weights.name_of(config.weights): digest})
    with model_folder.opened(folder, model_folder.OF_NETWORK, out) as here:
        architecture = pretrained.architecture_of(here, config.model.arguments)
        model = _built(architecture, task)
        pretrained.require_own_tokenizer(here, data, out)
        pretrained.load_into(model, here)
        digests = model_folder.digests(here, model_folder.OF_NETWORK)
        return model, architecture, _origin(config, digests, model_folder.licence(here))


def _built(architecture: ArchitectureSpec, task: Task) -> nn.Module:
    model = models.build(architecture, task)
    check_shapes(model, task, architecture.name)
    return model


def _origin(config: TrainConfig, sha256: dict[str, str], licence: str = "") -> WeightsOrigin:
    assert config.weights is not None
    return WeightsOrigin(
        source=weights.name_of(config.weights),
        licence=config.weights_licence or licence or "not stated",
        sha256=sha256,
    )


def check_required(required: Mapping[str, float], task: Task) -> None:
    """Raises ConfigInvalid for a metric that the task lacks, and for a share that cannot be reached."""
    for name, bound in required.items():
        metric = task.metric_named(name)
        if metric.is_share and not 0 < bound <= 1:
            raise ConfigInvalid(
                f"train.required.{name} is {bound:g}",
                why=f"{metric.label} is a share: above 0, at most 1",
                fix="give 0.9 for 90 %",
            )


def _missed(required: Mapping[str, float], task: Task, quality: Mapping[str, float]) -> str:
    """The metrics that are not as good as required, in words; empty if all are."""
    missed = []
    for name, bound in required.items():
        metric = task.metric_named(name)
        if not metric.is_met(quality[name], bound):
            value = metric.in_words(quality[name])
            missed.append(f"{metric.label} is {value}, train.required asks for {metric.in_words(bound)}")
    return "; ".join(missed)


def check_shapes(model: nn.Module, task: Task, name: str) -> None:
    """Raises ConfigInvalid unless the network takes the rows of `task`, and makes its outputs."""
    training = model.training
    try:
        with torch.no_grad(), time_limit(BUILD_S, f"a forward pass of {name}"):
            outputs = models.materialise(model, task).eval()(*task.example(2))
    except HpmlError:  # such as Terminated, from the handler of SIGTERM
        raise
    except Exception as error:
        raise ConfigInvalid(
            f"the network {name} does not take {task.row_in_words()}",
            why=" ".join(str(error).split())[:300],
            fix=f"set train.model.arguments, or {task.shape_options}",
        ) from None
    model.train(training)
    first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    shape = tuple(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
    if shape != task.output_shape(2):
        raise ConfigInvalid(
            f"the network {name} makes {shape} of 2 {task.rows}", why=f"it must be {task.output_shape(2)}"
        )
