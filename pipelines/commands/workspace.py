"""`hpml doctor`, `schema`, `gc` and `init`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpml.pipelines.commands.options import HOME, Format, Home, app, print_json


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look for what its cluster section names.")
    ] = None,
    output: Format = "table",
) -> None:
    """Say what is here and what to install: Python, torch, GPUs, container engine, the cluster."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.cluster.config import ClusterConfig
    from hpml.pipelines.workspace import doctor as examination

    cluster = recipes.load(recipe).recipe.cluster if recipe else ClusterConfig()
    examination.show(examination.examine(cluster), output)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from hpml.pipelines.recipe import Recipe

    print_json(Recipe.model_json_schema())


@app.command()
def gc(
    home: Home = HOME,
    keep_runs: Annotated[int, typer.Option(min=0, help="Keep what the newest N runs made.")] = 10,
    keep_registered: Annotated[
        bool, typer.Option(help="Keep what versions in the model registry were made from.")
    ] = True,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Clear the store of its cluster section instead.")
    ] = None,
    grace_days: Annotated[
        float, typer.Option(min=1, help="In a cluster's store: keep what any run used in the last N days.")
    ] = 14,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
) -> None:
    """Remove stored artifacts that none of the newest runs made, and what crashed runs left behind."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.workspace import gc as collect

    cluster = recipes.load(recipe).recipe.cluster if recipe else None
    if cluster:
        removed = collect.collect_cluster(
            home, cluster, keep_runs, keep_registered=keep_registered, grace_days=grace_days, dry_run=dry_run
        )
    else:
        removed = collect.collect_workspace(home, keep_runs, keep_registered=keep_registered, dry_run=dry_run)
    collect.show(removed, dry_run=dry_run)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new recipe.")],
    data: Annotated[str, typer.Option(help="mnist5k, digits, or a folder, archive or .npz of yours.")] = "",
    model: Annotated[str, typer.Option(help="cnn, resnet18, vit, or package.module:callable.")] = "",
    max_accuracy_drop: Annotated[
        float | None, typer.Option(help="Top-1 accuracy you would trade for speed; 0.01: one point.")
    ] = None,
) -> None:
    """Write a new recipe from three answers."""
    from hpml.pipelines.workspace import init as initialisation

    remarks = initialisation.write(file, *initialisation.ask(data, model, max_accuracy_drop))
    print(file)
    for remark in remarks:
        print(remark, file=sys.stderr)
