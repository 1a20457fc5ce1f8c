"""`hpml run`, and how every run ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpml.core.errors import StageFailed
from hpml.pipelines.commands.options import (
    HOME,
    Format,
    Home,
    RecipeFile,
    Set,
    Strict,
    app,
    print_json,
    strictly,
)

if TYPE_CHECKING:
    from hpml.pipelines.engine.execution import Settings
    from hpml.pipelines.engine.run_record import RunRecord
    from hpml.pipelines.plan import Plan
    from hpml.pipelines.recipe import LoadedRecipe


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Set = None,
    home: Home = HOME,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and why.")] = False,
    only: Annotated[str, typer.Option(metavar="STEP", help="Run this step and what it needs.")] = "",
    force: Annotated[
        list[str] | None, typer.Option(metavar="STEP", help="Run this step although it is cached.")
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Steps at once; by default as many as there are CPUs.")
    ] = None,
    tracking: Annotated[bool, typer.Option(help="Record the run in MLflow.")] = True,
    executor: Annotated[
        Literal["process", "container", "kubernetes"],
        typer.Option(help="Run steps as processes or containers of this machine, or as Jobs of a cluster."),
    ] = "process",
    strict: Strict = False,
    output: Format = "table",
) -> None:
    """Run a recipe: data to a chosen, registered, deployable model."""
    from hpml.pipelines import graph, plan
    from hpml.pipelines import recipe as recipes

    loaded = recipes.load(recipe, (*(overrides or ()), *strictly(strict)))
    steps = plan.trace(graph.graph, loaded.recipe)
    if only:
        steps = steps.needed_for(only)
    for step in force or ():
        steps.needed_for(step)
    settings = settings_of(home, loaded, executor, force=force, max_parallel=max_parallel, tracking=tracking)
    if dry_run:
        _forecast(loaded, steps, settings, executor, output)
    else:
        execute(loaded, steps, settings, executor, output, home=home, again=f"hpml run {recipe}")


def _forecast(loaded: LoadedRecipe, steps: Plan, settings: Settings, executor: str, output: str) -> None:
    """Print what a run would do, and why."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.engine.execution import forecast
    from hpml.pipelines.executors import named as executors
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.preflight import checks as preflight
    from hpml.pipelines.terminal import console

    with console.watcher() as watcher:
        run_id = run_record.new_run_id(loaded.recipe.name)
        opened = executors.open_executor(executor, loaded, settings, run_id, watcher)
        if executor == "process":
            forecasts, problems = preflight.forecast_checked(loaded, steps, settings, opened, watcher)
        else:
            opened.check(steps)
            applicability.tell(loaded, steps, settings, opened, watcher)
            forecasts, problems = forecast(steps, settings, opened), []
        opened.close("done")
        _print_forecast(forecasts, output)
        preflight.refuse(problems)


def execute(
    loaded: LoadedRecipe,
    steps: Plan,
    settings: Settings,
    executor: str,
    output: str,
    *,
    home: Path,
    again: str,
) -> None:
    """Run `steps` of a recipe, and print what they found. again: the command that resumes it."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.engine.execution import Execution
    from hpml.pipelines.executors import named as executors
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.preflight import checks as preflight
    from hpml.pipelines.terminal import console, results

    with console.watcher() as watcher:
        run_id = run_record.new_run_id(loaded.recipe.name)
        opened = executors.open_executor(executor, loaded, settings, run_id, watcher)
        if executor == "process":
            recipes.check_targets(loaded.recipe)
        opened.check(steps)
        if executor == "process":
            preflight.check_network(loaded, steps, settings, opened, watcher)
        applicability.tell(loaded, steps, settings, opened, watcher)
        store = loaded.recipe.cluster.store if executor == "kubernetes" else ""
        record = run_record.start(
            home, run_id, loaded.recipe.name, str(loaded.file), steps, executor=executor, store=store
        )
        results.store_recipe(home, record, loaded)
        record = Execution(steps, record, settings, watcher, opened).execute()
    results.show(home, record, output)
    end_of_run(record, again, completed_by=f"hpml bench {record.id}")


def settings_of(
    home: Path,
    loaded: Any,
    executor: str,
    *,
    force: list[str] | None,
    max_parallel: int | None,
    tracking: bool,
) -> Settings:
    from hpml.io.tracking import store_of
    from hpml.pipelines.engine.execution import Settings

    home = home.resolve()
    registry = os.environ.get("MLFLOW_TRACKING_URI") or store_of(home)
    if executor == "kubernetes":  # what its pods reach
        registry = loaded.recipe.cluster.tracking_uri or registry
    return Settings(
        home=home,
        import_paths=loaded.import_paths,
        max_parallel=max_parallel,
        force=frozenset(force or ()),
        tracking_uri=registry if tracking else "",
        registry_uri=registry,
    )


def _print_forecast(forecasts: list[Any], output: str) -> None:
    import dataclasses

    from hpml.pipelines.terminal import console

    if output == "json":
        print_json([dataclasses.asdict(item) for item in forecasts])
    else:
        rows = [(item.step, item.outcome, "; ".join(item.reasons[:3])) for item in forecasts]
        console.print_table(("step", "outcome", "why"), rows)


def end_of_run(record: RunRecord, again: str, *, completed_by: str) -> None:
    """Raise the first failure with its exit code; say how a run is resumed, or its measurement completed."""
    raise_failure(record)
    if record.status == "interrupted":
        print(f"interrupted; resume with: {again}", file=sys.stderr)
        raise SystemExit(record.exit_code)
    warn_incomplete(record, completed_by)


def warn_incomplete(record: RunRecord, completed_by: str) -> None:
    """Say what lacks something and why, and the command that completes it."""
    from hpml.pipelines.engine.execution import incomplete_steps

    missing = incomplete_steps(record)
    if missing:
        print(f"warning: {'; '.join(missing)}", file=sys.stderr)
        print(f"to complete it: {completed_by}", file=sys.stderr)


def raise_failure(record: RunRecord, where: str = "") -> None:
    """Raise the first failure with its exit code, after a warning for each that is not the run's."""
    from hpml.core.errors import ExitCode
    from hpml.pipelines.engine.execution import first_failure, not_shown

    for sentence in not_shown(record):
        print(f"warning: {sentence}", file=sys.stderr)
    failure = first_failure(record)
    if failure:
        name, step = failure
        error = StageFailed(f"step {name} failed", why=step.error, fix=f"its log: hpml logs {name}{where}")
        error.exit_code = ExitCode(step.exit_code)
        raise error
