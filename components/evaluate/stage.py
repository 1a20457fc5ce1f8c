"""Score the chosen engine and the reference on the test split, once."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec, build_of
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.core.contract import Output, Result, validate
from hpml.measuring.goals import Goals, decide, metric_of
from hpml.targets import AnyTarget
from hpml.tasks import task_of
from hpml.tasks.base import Runs


def run(
    config: Goals,
    *,
    measured: Artifact[MeasurementsSpec],
    engines: dict[str, Artifact[EngineSpec]],
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[EvaluationSpec]:
    """Say how good the engine that `config` chooses is on rows that no choice was made by.

    It chooses as select does, and not by what select wrote, so that a report need not wait for a step that
    refuses where nothing meets the goals. Then the test split is left alone.
    """
    decision = decide(config, measured.spec)
    if decision.chosen is None:
        return Result(EvaluationSpec(test_split="never", reason=decision.reason))
    from hpml.measuring.quality import paired_quality, quality
    from hpml.tasks.judging import judge

    chosen, reference = decision.chosen, measured.spec.reference
    task, metric = task_of(data.spec.task), metric_of(config, measured.spec)
    engine = build_of(engines[chosen], measured.spec.engines[chosen].variant)
    test = task.stored(data, "test")
    of_reference, judged = judge(
        task,
        _opened(build_of(engines[reference], measured.spec.engines[reference].variant), out),
        {chosen: _opened(engine, out)},
        test,
    )
    of_engine = judged[chosen]
    spec = EvaluationSpec(
        test_split="once",
        engine=chosen,
        engine_digest=engines[chosen].digest,
        reference=reference,
        rows=data.spec.split("test").rows,
        metrics=tuple(sorted(measured.spec.metrics, key=lambda one: one.name != metric.name)),
        quality=quality(of_engine),
        reference_quality=quality(of_reference),
        paired=paired_quality(of_engine, of_reference, task.groups(test)),
    )
    return Result(spec, {f"test_{name}": figure.value for name, figure in spec.quality.items()})


def _opened(engine: Artifact[EngineSpec], out: Output) -> Runs:
    target: AnyTarget = validate(AnyTarget, engine.spec.target, where="the target of the engine")
    # Other steps run beside this one: threads that spin would take their CPUs.
    return target.load(engine.path, engine.spec, threads=out.threads, spinning=False)
