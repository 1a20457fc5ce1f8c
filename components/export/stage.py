"""Build an engine of a model for one target, and refuse it unless it agrees with the model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from components.artifacts import Artifact, DatasetSpec, EngineSpec, ModelSpec
from components.contract import Output, Result
from components.targets import TOLERANCES, AnyTarget, Built, NotBuilt

if TYPE_CHECKING:
    from components.export.gate import Agreement
    from components.targets import Target

GOLDEN_ROWS = 16


def run(
    config: AnyTarget, *, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output
) -> Result[EngineSpec]:
    """Write an engine, its golden samples, and its logits on the test split.

    The engine is loaded again as its users will load it and compared with the model in torch over the whole
    test split; beyond the target's tolerance the artifact is rejected. Where there is no model, or the
    machine lacks what the target needs, the artifact says so and holds no engine.
    """
    unbuilt = _describe(config, model.spec)
    missing = model.spec.reason or config.missing()
    built = NotBuilt(missing) if missing else config.build(model, data, out)
    if isinstance(built, NotBuilt):
        return Result(unbuilt.model_copy(update={"reason": built.reason}))
    spec = unbuilt.model_copy(
        update={
            "status": "built",
            "file": built.file,
            "precision": built.precision,
            "identity": built.identity,
            "notes": built.notes,
            "size_bytes": sum(
                file.stat().st_size
                for file in out.path.rglob("*")
                if file.is_file() and file.name not in built.companions
            ),
        }
    )
    return _judged(config, spec, _answers(config, spec, model, data, out), built)


def _describe(config: Target, model: ModelSpec) -> EngineSpec:
    return EngineSpec(
        target=config.model_dump(mode="json"),
        status="not built",
        precision="int8" if model.quantization else "fp32",
        methods=model.methods,
        input=model.input,
        class_names=model.class_names,
        parameters=model.parameters,
        macs=model.macs,
    )


def _answers(
    config: Target, spec: EngineSpec, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output
) -> Agreement:
    """Write what the engine says of the golden samples and of the test split; compare it with the network."""
    import numpy as np

    from components import models
    from components.export.gate import compare
    from components.images import load_split, predict_split, to_x_nchw
    from components.training.loop import evaluate

    session = config.load(out.path, spec, threads=out.threads)
    images_nhwc, labels = load_split(data, "test")
    logits = predict_split(session.predict, images_nhwc, spec.input)
    np.save(out.path / "test_logits.npy", logits)
    # Spread over the split: a folder of images is sorted by class.
    rows = np.linspace(0, len(images_nhwc) - 1, GOLDEN_ROWS).astype(int)
    golden_x_nchw = to_x_nchw(images_nhwc[rows], spec.input)
    np.save(out.path / "golden_x_nchw.npy", golden_x_nchw)
    np.save(out.path / "golden_logits.npy", session.predict(golden_x_nchw))
    return compare(logits, evaluate(models.load(model), data, spec.input), labels)


def _judged(config: Target, spec: EngineSpec, agreement: Agreement, built: Built) -> Result[EngineSpec]:
    from components.export.gate import objections

    spec = spec.model_copy(
        update={
            "accuracy_top1": agreement.accuracy_top1,
            "max_abs_error": agreement.max_abs_error,
            "top1_agreement": agreement.top1_agreement,
        }
    )
    tolerance = config.tolerance.or_else(TOLERANCES[built.precision])
    metrics = {**asdict(agreement), **built.metrics, "size_bytes": spec.size_bytes}
    return Result(spec, metrics, rejected=objections(agreement, tolerance))
