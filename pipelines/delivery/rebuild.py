"""A bundle for this machine in place of one whose engine is bound to another: its network, exported here.

That is a run of its own: what `hpml run` would do of the same recipe, for this one engine, from the networks
on. These are the run's, since training them again on another machine would give others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from hpml.core.errors import ConfigInvalid, ExitCode, StageFailed
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.origin import Origin, origin_of
from hpml.pipelines.delivery.rollout import Say
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings, first_failure
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.terminal import console, results

_KEPT = ("prepare", "train", "compress")  # stages whose results are taken as they are


def rebuilt(bundle: Deployable, say: Say) -> Deployable:
    """The bundle of the same network and target for this machine; `bundle` itself if it runs here.

    It is exported, compared with its network, measured, judged and registered as in any run.
    Raises ConfigInvalid if this machine lacks what the target needs, UsageError or StageFailed if the run
    that made `bundle`, or what that made, is not at hand; StageFailed with a step's exit code if one fails.
    """
    why = bundle.target.foreign_reason(bundle.facts.engine)
    if not why:
        say(f"{bundle.title} runs on this machine as it is: nothing is rebuilt")
        return bundle
    if missing := bundle.target.missing():
        raise ConfigInvalid(
            f"{bundle.title} cannot be rebuilt here for the target {bundle.target.target}",
            why=missing,
            fix="run its recipe with another target, such as onnx",
        )
    origin = origin_of(bundle)
    say(f"{bundle.title} is rebuilt from run {origin.record.id}: {why}")
    record = _run(origin)
    return Deployable(origin.home / record.id / "bundle", origin.home)


def _run(origin: Origin) -> RunRecord:
    home, plan = origin.home.resolve(), plan_of(origin)
    kept = {name: origin.record.steps[name] for name, node in plan.nodes.items() if node.stage in _KEPT}
    registry = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home}/mlflow.db"
    settings = Settings(
        home=home,
        import_paths=origin.loaded.import_paths,
        tracking_uri=registry,
        registry_uri=registry,
        becomes_latest=False,
    )
    executor = Processes(home, registry_uri=registry)
    made_here = {name: node for name, node in plan.nodes.items() if name not in kept}
    executor.check(Plan(made_here))
    for name in kept.keys() & {parent for node in made_here.values() for parent in node.parents()}:
        origin.artifact(name)  # it is, or comes, into the workspace's store
    record = _begun(origin, plan, kept)
    with console.watcher() as watcher:
        record = Execution(plan, record, settings, watcher, executor).execute()
    if failure := first_failure(record):
        name, step = failure
        error = StageFailed(
            f"it cannot be rebuilt here: step {name} failed",
            why=step.error,
            fix=f"its log: hpml logs {name} --run {record.id}",
        )
        error.exit_code = ExitCode(step.exit_code)
        raise error
    if record.status == "interrupted":
        raise SystemExit(record.exit_code)
    return record


def plan_of(origin: Origin) -> Plan:
    """The part of the run's plan that ends in its bundle, with no engines but this one and the reference."""
    benchmark = next(node for node in origin.plan.nodes.values() if node.stage == "benchmark")
    engines = benchmark.inputs["engines"]
    assert not isinstance(engines, str)
    reference = origin.loaded.recipe.benchmark.reference
    chosen = {name: step for name, step in engines.items() if name == reference or step == origin.export.name}
    nodes = {name: _with_engines(node, chosen) for name, node in origin.plan.nodes.items()}
    [bundle] = (node.name for node in nodes.values() if node.stage == "bundle")
    return Plan(nodes).needed_for(bundle)


def _with_engines(node: Node, engines: Mapping[str, str]) -> Node:
    return replace(node, inputs={**node.inputs, "engines": engines}) if "engines" in node.inputs else node


def _begun(origin: Origin, plan: Plan, kept: Mapping[str, StepRecord]) -> RunRecord:
    """The record of a new run of `plan`, in which the steps `kept` are over."""
    run = run_record.new_run_id(origin.record.recipe)
    record = run_record.start(origin.home, run, origin.record.recipe, origin.record.recipe_file, plan)
    steps = {
        name: StepRecord(stage=step.stage, status="cached", key=step.key, digest=step.digest)
        for name, step in kept.items()
    }
    told = {"steps": {**record.steps, **steps}, "rebuilt_from": origin.record.id}
    results.store_recipe(origin.home, record, origin.loaded)
    return record.model_copy(update=told)
