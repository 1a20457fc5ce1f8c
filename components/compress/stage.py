"""Make a trained network smaller by one method, and say what it cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.compress import AnyMethod, DoesNotApply, Network
from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Output, Result
from hpml.core.errors import StageFailed

if TYPE_CHECKING:
    from torch import nn


def run(
    config: AnyMethod,
    *,
    model: Artifact[ModelSpec],
    teacher: Artifact[ModelSpec],
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[ModelSpec]:
    """Apply one method to `model`, and write `model.safetensors` and `history.json`.

    The written network is read back as its users will read it, held against the one in memory, and evaluated:
    in simulated int8, if it is to be quantized. Where the method does not apply to the network, or to what a
    method before it did not build, the artifact says so and holds none. Raises StageFailed if it does not
    rebuild exactly.
    """
    from hpml import models

    if model.spec.status == "not built":
        return _not_built(config, model.spec, model.spec.reason)
    before = Network(models.load(model), model.spec.input, model.spec.quantization)
    try:
        config.check(before.module)
        after = config.apply(before, models.load(teacher), data, out)
    except DoesNotApply as error:
        out.note(f"not built: {error}")
        return _not_built(config, model.spec, str(error))
    models.save(after.module, out.path)
    write_text_atomic(out.path / "history.json", json.dumps(after.history))

    spec = _describe(config, model.spec, after)
    rebuilt = models.load_weights(models.rebuild(spec), out.path / models.WEIGHTS).eval()
    _require_equal(after.module, rebuilt, data, spec)
    spec = spec.model_copy(update={"accuracy_top1": _accuracy_top1(rebuilt, data, spec)})
    metrics = {
        f"{name}_{when}": getattr(described, field)
        for name, field in (("parameters", "parameters"), ("macs", "macs"), ("accuracy", "accuracy_top1"))
        for when, described in (("before", model.spec), ("after", spec))
    }
    return Result(spec, metrics)


def _not_built(config: AnyMethod, model: ModelSpec, reason: str) -> Result[ModelSpec]:
    """The manifest of a network that there is not: what it would have been, and why it is not."""
    return Result(
        model.model_copy(
            update={
                "methods": (*model.methods, config.label),
                "status": "not built",
                "reason": reason,
                "parameters": 0,
                "macs": 0,
                "accuracy_top1": 0.0,
            }
        )
    )


def _describe(config: AnyMethod, model: ModelSpec, after: Network) -> ModelSpec:
    """The manifest of the compressed network; its channel plan starts from the architecture as built."""
    from hpml import models
    from hpml.models.channel_plan import channel_plan, layer_sizes

    built = models.rebuild(model.model_copy(update={"channel_plan": None}))
    parameters, macs = models.count(after.module, model.input)
    return model.model_copy(
        update={
            "methods": (*model.methods, config.label),
            "channel_plan": channel_plan(layer_sizes(built), after.module) or None,
            "quantization": after.quantization,
            "parameters": parameters,
            "macs": macs,
        }
    )


def _require_equal(
    written: nn.Module, rebuilt: nn.Module, data: Artifact[DatasetSpec], spec: ModelSpec
) -> None:
    import torch

    from hpml.tasks.images import load_split, to_x_nchw

    images_nhwc, _ = load_split(data, "test")
    x_nchw = torch.from_numpy(to_x_nchw(images_nhwc[:32], spec.input))
    with torch.inference_mode():
        difference = float((written.eval()(x_nchw) - rebuilt(x_nchw)).abs().max())
    # Equal weights in another memory layout may be summed in another order.
    if not difference <= 1e-4:
        raise StageFailed(
            "the compressed network does not rebuild from its manifest",
            why=f"its logits differ by {difference:.3g}",
            fix="the method changed more than layer sizes and weights; report it",
        )


def _accuracy_top1(network: nn.Module, data: Artifact[DatasetSpec], spec: ModelSpec) -> float:
    """Top-1 on the test split, in simulated int8 if the network is to be quantized."""
    import torch

    from hpml.components.compress.simulate import simulate_int8
    from hpml.tasks.images import load_split, to_x_nchw, top1_accuracy
    from hpml.training.loop import evaluate

    if spec.quantization:
        images_nhwc, _ = load_split(data, "train")
        calibration_nhwc = images_nhwc[list(spec.quantization.calibration_rows)]
        network = simulate_int8(
            network, spec.quantization, torch.from_numpy(to_x_nchw(calibration_nhwc, spec.input))
        )
    _, labels = load_split(data, "test")
    return top1_accuracy(evaluate(network, data, spec.input), labels)
