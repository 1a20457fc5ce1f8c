"""The `hpml` command. Data goes to stdout, all else to stderr; heavy imports wait for their command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from hpml.core.errors import UsageError, explained
from hpml.pipelines.commands import chat, deploy, inspect_run, kubeflow, measure, run, serving, workspace  # noqa: F401 (they register verbs)
from hpml.pipelines.commands.options import app

# typer raises click's UsageError, its own copy of click's since 0.26; BadParameter is the public door to it.
_WrongUsage: Any = typer.BadParameter.__bases__[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"hpml {importlib.metadata.version('hpml-pipeline')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; `main` reads --debug."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command; every failure is one line on stderr and an exit code of hpml.core.errors."""
    given = sys.argv[1:] if arguments is None else arguments
    with explained(debug="--debug" in given):
        try:
            status = app(args=given, prog_name="hpml", standalone_mode=False)
        except _WrongUsage as error:
            command = error.ctx.command_path if error.ctx else "hpml"
            raise UsageError(error.format_message(), fix=f"see {command} --help") from None
        except typer.Abort:
            raise KeyboardInterrupt from None
        if isinstance(status, int) and status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
