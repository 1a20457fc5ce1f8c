"""Build an engine of a model for one target, and refuse it unless it agrees with the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.core.contract import Output, Result
from hpml.targets import AnyTarget, Built, NotBuilt, tolerance_of
from hpml.tasks import Task, task_of

if TYPE_CHECKING:
    from hpml.targets import Target
    from hpml.tasks.judging import Judgement


def run(
    config: AnyTarget, *, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output
) -> Result[EngineSpec]:
    """Write an engine, its golden samples, what its answers to the validation split are worth and are like.

    The engine is loaded again as its users will load it and compared with the model in torch over the whole
    validation split; beyond the target's tolerance the artifact is rejected. The same holds for each
    variant of it; one that fails is left out. Where there is no model, or the machine lacks what the target
    needs, the artifact says so and holds no engine.
    """
    from hpml import models
    from hpml.tasks import golden
    from hpml.tasks.drift.baseline import save_reference
    from hpml.tasks.judging import judge
    from hpml.tasks.torch_session import TorchSession

    unbuilt = _describe(config, model.spec)
    missing = model.spec.reason or config.missing()
    built = NotBuilt(missing) if missing else config.build(model, data, out)
    if isinstance(built, NotBuilt):
        return Result(unbuilt.model_copy(update={"reason": built.reason}))
    task = task_of(model.spec.task)
    builds = {"": built, **built.variants}
    specs = {name: _described(unbuilt, one, out.path / name) for name, one in builds.items()}
    sessions = {  # other steps run beside this one: threads that spin would take their CPUs
        name: config.load(out.path / name, spec, threads=out.threads, spinning=False)
        for name, spec in specs.items()
    }
    network = TorchSession(models.load(model), task, model.spec.operations)
    stored = task.stored(data, "validation")
    of_network, judged = judge(task, network, sessions, stored)
    requests = golden.golden_inputs(task, network, model.spec.operations, stored)
    golden.save_inputs(out.path, model.spec.operations, requests)
    variants, notes = {}, []
    for name in built.variants:
        result = _judged(config, task, built.variants[name], specs[name], judged[name], of_network)
        if result.rejected:
            shutil.rmtree(out.path / name)
            notes.append(f"there is no build with {name.replace('-', ' ')}: {result.rejected}")
        else:
            variants[name] = result.spec
            judged[name].save(out.path / name)
            golden.save_outputs(out.path / name, model.spec.operations, requests, sessions[name])
    judged[""].save(out.path)
    golden.save_outputs(out.path, model.spec.operations, requests, sessions[""])
    for name in ("", *variants):
        save_reference(out.path / name, task, network, sessions[name], stored)
    for name in task.files:
        shutil.copyfile(data.file(name), out.path / name)
    result = _judged(config, task, built, specs[""], judged[""], of_network)
    more = {"variants": variants, "notes": (*built.notes, *notes)}
    return replace(result, spec=result.spec.model_copy(update=more))


def _describe(config: Target, model: ModelSpec) -> EngineSpec:
    return EngineSpec(
        target=config.model_dump(mode="json"),
        status="not built",
        precision="int8" if model.quantization else "fp32",
        origin=model.origin,
        methods=model.methods,
        task=model.task,
        operations=model.operations,
        parameters=model.parameters,
        macs=model.macs,
    )


def _described(unbuilt: EngineSpec, built: Built, folder: Path) -> EngineSpec:
    """The engine that is in `folder`, not judged yet."""
    files = (file for file in folder.iterdir() if file.is_file() and file.name not in built.companions)
    return unbuilt.model_copy(
        update={
            "status": "built",
            "file": built.file,
            "graphs": dict(built.graphs),
            "precision": built.precision,
            "identity": built.identity,
            "notes": built.notes,
            "size_bytes": sum(file.stat().st_size for file in files),
        }
    )


def _judged(
    config: Target, task: Task, built: Built, spec: EngineSpec, engine: Judgement, network: Judgement
) -> Result[EngineSpec]:
    from hpml.components.export.gate import objections

    told: dict[str, Any] = {
        "quality": engine.quality,
        "max_abs_error": engine.max_abs_error,
        "agreement": engine.agreement,
        "generation_agreement": engine.generation_agreement,
    }
    metric = task.metric
    loss = metric.loss(engine.quality[metric.name], network.quality[metric.name])
    metrics = {
        **engine.quality,
        "quality_loss": loss,
        "max_abs_error": engine.max_abs_error,
        "size_bytes": float(spec.size_bytes),
    }
    for name in ("agreement", "generation_agreement"):
        if told[name] is not None:
            metrics[name] = told[name]
    tolerance = tolerance_of(built.precision, config.tolerance, task, decides=engine.agreement is not None)
    rejected = objections(task, engine, network, tolerance)
    return Result(spec.model_copy(update=told), metrics, rejected=rejected)
