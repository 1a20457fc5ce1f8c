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
from hpml.tasks import task_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpml.tasks.base import Outputs


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
    before = Network(models.load(model), task_of(model.spec.task), model.spec.quantization)
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
    spec = spec.model_copy(update={"quality": _quality(rebuilt, data, spec)})
    metrics = {
        f"{name}_{when}": value
        for when, described in (("before", model.spec), ("after", spec))
        for name, value in {
            "parameters": described.parameters,
            "macs": described.macs,
            **described.quality,
        }.items()
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
                "quality": {},
            }
        )
    )


def _describe(config: AnyMethod, model: ModelSpec, after: Network) -> ModelSpec:
    """The manifest of the compressed network; its channel plan starts from the architecture as built."""
    from hpml import models
    from hpml.models.channel_plan import channel_plan, layer_sizes

    built = models.rebuild(model.model_copy(update={"channel_plan": None}))
    parameters, macs = models.count(after.module, after.task)
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

    from hpml.tasks.judging import rows_of

    task = task_of(spec.task)
    stored = rows_of(task.stored(data, "validation"), slice(32))
    features = task.training_features({name: torch.from_numpy(array) for name, array in stored.items()})
    with torch.inference_mode():
        answers = [_as_tuple(network(*features)) for network in (written.eval(), rebuilt)]
        difference = max(_share(one - other, one) for one, other in zip(*answers, strict=True))
    # Equal weights in another memory layout may be summed in another order.
    if not difference <= 1e-4:
        raise StageFailed(
            "the compressed network does not rebuild from its manifest",
            why=f"its outputs differ by {difference:.3g} (of the largest, where that is more than 1)",
            fix="the method changed more than layer sizes and weights; report it",
        )


def _share(difference: Tensor, whole: Tensor) -> float:
    """The largest difference, as a share of the largest output where that is more than 1."""
    return float(difference.abs().max() / whole.abs().max().clamp(min=1))


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _quality(network: nn.Module, data: Artifact[DatasetSpec], spec: ModelSpec) -> dict[str, float]:
    """On the validation split, in simulated int8 if the network is to be quantized."""
    import torch

    from hpml.components.compress.simulate import simulate_int8
    from hpml.tasks.effective_bits import LEAST_BITS
    from hpml.tasks.judging import rows_of
    from hpml.training.loop import evaluate

    if spec.quantization:
        task = task_of(spec.task)
        rows = rows_of(task.stored(data, "train"), list(spec.quantization.calibration_rows))
        features = task.training_features({name: torch.from_numpy(array) for name, array in rows.items()})
        least_bits = LEAST_BITS if task.int8_operators else 0.0
        network = simulate_int8(network, spec.quantization, features, least_bits=least_bits)
    return evaluate(network, data)
