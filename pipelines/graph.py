"""The whole pipeline, read downward. A step is a stage's `run`, its config, and the steps it reads from."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hpml.components.benchmark import stage as benchmark
from hpml.components.bundle import stage as bundle
from hpml.components.compress import stage as compress
from hpml.components.diagnose import stage as diagnose
from hpml.components.evaluate import stage as evaluate
from hpml.components.export import stage as export
from hpml.components.peaks import stage as peaks
from hpml.components.prepare import stage as prepare
from hpml.components.register import stage as register
from hpml.components.report import stage as report
from hpml.components.select import stage as select
from hpml.components.train import stage as train
from hpml.targets import Eager

if TYPE_CHECKING:
    from hpml.pipelines.plan import Step
    from hpml.pipelines.recipe import Recipe

Handle = TypeVar("Handle")


def graph(step: Step[Handle], recipe: Recipe) -> None:
    """Data to a chosen, registered, deployable model. Equal steps of two variants are one step."""
    data = step(prepare.run, recipe.data)
    base = step(train.run, recipe.train, data=data)
    models = {"base": base}
    engines = {recipe.benchmark.reference: step(export.run, Eager(), model=base, data=data)}
    for variant, methods in recipe.variants.items():  # "fp32", "int8", "pruned-distilled-int8", ...
        model = base
        for method in methods:  # Prune(...), Distill(...), Quantize(...)
            model = step(compress.run, method, model=model, teacher=base, data=data)
            models[f"{variant} {method.label}"] = model
        for target in recipe.targets:  # Onnx(...), TensorRT(...)
            engines[f"{variant}/{target.label}"] = step(export.run, target, model=model, data=data)
    measured = step(benchmark.run, recipe.benchmark, engines=engines, data=data)  # interleaved, once
    roofs = step(peaks.run, recipe.peaks)
    why = step(diagnose.run, recipe.diagnose, engines=engines, measured=measured, peaks=roofs, data=data)
    tested = step(evaluate.run, recipe.goals, measured=measured, engines=engines, data=data)
    step(
        report.run,
        recipe.goals,
        measured=measured,
        engines=engines,
        models=models,
        data=data,
        peaks=roofs,
        diagnosis=why,
        evaluation=tested,
    )
    chosen = step(select.run, recipe.goals, measured=measured, engines=engines)
    version = step(register.run, recipe.registry, engine=chosen, measured=measured, evaluation=tested)
    step(bundle.run, recipe.bundle, engine=chosen, version=version, evaluation=tested)
