"""The command and the options that verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(
    name="hpml",
    help="Data to a chosen, registered, deployable model: an MLOps pipeline for high-performance ML.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Home = Annotated[
    Path, typer.Option("--home", envvar="HPML_HOME", help="The workspace: store, runs, MLflow database.")
]


Run = Annotated[str, typer.Option("--run", help="A run's id.")]


RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id.")]


Format = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="What stdout gets.")]


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file.")]


MarkdownFormat = Annotated[
    Literal["table", "json", "markdown"], typer.Option("--output", "-o", help="What stdout gets.")
]


Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with pictures.")]


Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=SIZE", help="A size that a model leaves open, beside the batch."),
]


SampleData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE.npz",
        help="Real samples: arrays by the names of the inputs, samples in front; they say open sizes, too.",
    ),
]


Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.epochs=3."),
]


Host = Annotated[
    str, typer.Option("--host", metavar="URL", help="Kubeflow Pipelines; by default KF_PIPELINES_ENDPOINT.")
]


RemoteHost = Annotated[
    str, typer.Option("--host", metavar="URL", help="Of a run in Kubeflow: where that is reached by now.")
]


InCluster = Annotated[
    bool, typer.Option("--in-cluster", help="The Kubeflow of the cluster that this pod runs in.")
]


Experiment = Annotated[str, typer.Option(metavar="E", help="Of Kubeflow; by default the recipe's name.")]


Namespace = Annotated[str, typer.Option(help="Yours, in a Kubeflow that has many users.")]


Strict = Annotated[bool, typer.Option("--strict", help="Exit with 5 if something is not measured.")]


HOME = Path("runs")


def told_as_retired(option: str) -> Any:
    """A callback for an option that is taken as before and does nothing any more."""

    def tell(given: Any) -> None:
        from hpml.pipelines import retired

        if given:
            retired.tell([option])

    return tell


AllowNoise = Annotated[
    bool, typer.Option("--allow-noise", hidden=True, callback=told_as_retired("--allow-noise"))
]


def strictly(strict: bool) -> tuple[str, ...]:
    """What --strict sets in a recipe."""
    return ("benchmark.require_quiet=true",) if strict else ()


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
