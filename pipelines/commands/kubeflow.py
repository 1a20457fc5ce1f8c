"""`hpml compile`, `submit` and `schedule`: Kubeflow Pipelines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpml.pipelines.commands.options import (
    HOME,
    Experiment,
    Home,
    Host,
    InCluster,
    Namespace,
    RecipeFile,
    Set,
    app,
)
from hpml.pipelines.commands.run import raise_failure, warn_incomplete

if TYPE_CHECKING:
    from hpml.pipelines.engine.run_record import RunRecord


@app.command("compile")
def compile_recipe(
    recipe: RecipeFile,
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The pipeline to write, YAML.")
    ] = Path("pipeline.yaml"),
    overrides: Set = None,
) -> None:
    """Compile a recipe for Kubeflow Pipelines."""
    from hpml.core.atomic_files import write_text_atomic
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow.compile import compile_pipeline

    compiled = compile_pipeline(recipes.load(recipe, tuple(overrides or ())))
    write_text_atomic(file, compiled.text)
    names = ", ".join(parameter.name for parameter in compiled.parameters)
    size_kib = len(compiled.text.encode()) / 1024
    print(f"{len(compiled.tasks)} steps, {size_kib:.0f} KiB; parameters: {names}", file=sys.stderr)
    print(file)


@app.command()
def submit(
    recipe: RecipeFile,
    overrides: Set = None,
    host: Host = "",
    in_cluster: InCluster = False,
    experiment: Experiment = "",
    namespace: Namespace = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the run until it is over, and fetch its report.")
    ] = False,
    home: Home = HOME,
) -> None:
    """Run a recipe on Kubeflow Pipelines; stdout gets the run's id, for hpml status and hpml logs."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.terminal import console

    loaded = recipes.load(recipe, tuple(overrides or ()))
    target = kubeflow_runs.Target(host, in_cluster, experiment, namespace)
    with console.watcher() as watcher:
        applicability.warn(loaded, watcher)
        record = kubeflow_runs.submit(home, loaded, target, watcher)
        print(record.id, flush=True)
        remote = kubeflow_runs.remote_run(home, record.id)
        if wait and remote:
            record = kubeflow_runs.wait(home, record, remote, watcher)
    if wait:
        end_of_remote_run(record, completed_by=f"hpml submit {home / record.id / recipes.STORED}")


def end_of_remote_run(record: RunRecord, *, completed_by: str) -> None:
    """Raise the first failure with its exit code; say that a run was stopped, or what completes it."""
    raise_failure(record, where=f" --run {record.id}")
    if record.status == "interrupted":
        print("the run was stopped in Kubeflow", file=sys.stderr)
        raise SystemExit(record.exit_code)
    warn_incomplete(record, completed_by)


@app.command()
def schedule(
    recipe: RecipeFile,
    cron: Annotated[
        str,
        typer.Option(
            metavar="'M H D M W'", help="When, such as '0 3 * * 1-5'; in UTC unless Kubeflow says otherwise."
        ),
    ],
    overrides: Set = None,
    host: Host = "",
    in_cluster: InCluster = False,
    experiment: Experiment = "",
    namespace: Namespace = "",
) -> None:
    """Have Kubeflow Pipelines run a recipe on a cron schedule; stdout gets the schedule's id."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs
    from hpml.pipelines.terminal import console

    loaded = recipes.load(recipe, tuple(overrides or ()))
    target = kubeflow_runs.Target(host, in_cluster, experiment, namespace)
    with console.watcher() as watcher:
        print(kubeflow_runs.schedule(loaded, target, cron, watcher))
