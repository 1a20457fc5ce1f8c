"""What one training process does: build the network, check that it fits the images, train, write."""

from __future__ import annotations

import json

import torch
from torch import nn

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.artifacts.model_input import InputSpec
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Output, Result
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.models.limits import BUILD_S, time_limit
from hpml.training.loop import fit
from hpml.training.weights import load_into


def train(config: TrainConfig, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]:
    """Train in this process (one of a group, where it was started so) and write the model into `out.path`."""
    height, width, channels = data.spec.image_shape_hwc
    inputs = InputSpec(
        shape_chw=(channels, height, width),
        mean=data.spec.mean,
        std=data.spec.std,
        pictures=data.spec.pictures,
    )
    architecture = ArchitectureSpec(name=config.model.architecture, arguments=config.model.arguments)
    torch.manual_seed(config.seed)
    model = models.build(architecture, in_channels=channels, num_classes=len(data.spec.class_names))
    check_shapes(model, inputs, len(data.spec.class_names), config.model.architecture)
    if config.weights is not None:
        load_into(model, config.weights, out)

    fitted = fit(model, data, inputs, config, out)

    models.save(fitted.model, out.path)
    (out.path / "history.json").write_text(json.dumps(fitted.history, indent=1))
    parameters, macs = models.count(fitted.model, inputs)
    accuracy = fitted.metrics["test_accuracy"]
    spec = ModelSpec(
        architecture=architecture,
        input=inputs,
        class_names=data.spec.class_names,
        parameters=parameters,
        macs=macs,
        accuracy_top1=accuracy,
    )
    metrics = {**fitted.metrics, "parameters": parameters, "macs": macs}
    least, rejected = config.min_accuracy, ""
    if least is not None and accuracy < least:
        rejected = f"top-1 is {accuracy:.2%}, min_accuracy asks for {least:.2%}"
    return Result(spec, metrics, rejected)


def check_shapes(model: nn.Module, inputs: InputSpec, classes: int, name: str) -> None:
    """Raises ConfigInvalid unless the network makes (batch, classes) logits of the dataset's images."""
    images = "x".join(str(size) for size in inputs.shape_chw)
    training = model.training
    try:
        with torch.no_grad(), time_limit(BUILD_S, f"a forward pass of {name}"):
            logits = models.materialise(model, inputs).eval()(torch.zeros(2, *inputs.shape_chw))
    except HpmlError:  # such as Terminated, from the handler of SIGTERM
        raise
    except Exception as error:
        raise ConfigInvalid(
            f"the network {name} does not take images of {images} (channels x height x width)",
            why=" ".join(str(error).split())[:300],
            fix="set train.model.arguments, or data.image_size",
        ) from None
    model.train(training)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (2, classes):
        raise ConfigInvalid(f"the network {name} makes {shape} of 2 images", why=f"it must be (2, {classes})")
