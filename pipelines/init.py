"""Writes a new recipe from three answers: data, model, goals."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
import yaml

from components.errors import UsageError
from components.prepare.sources import SOURCES
from pipelines import recipe

_ARCHIVES = (".tar.gz", ".tgz", ".zip", ".tar")


def ask(data: str, model: str, max_accuracy_drop: float | None) -> tuple[str, str, float]:
    """The three answers: those given, the others asked for on a terminal.

    Raises UsageError naming the flags where there is nobody to ask.
    """
    given = {"--data": data, "--model": model, "--max-accuracy-drop": max_accuracy_drop}
    missing = [flag for flag, answer in given.items() if answer in ("", None)]
    if missing and not sys.stdin.isatty():
        raise UsageError(f"init needs {', '.join(missing)}", why="there is no terminal to ask on")
    return (
        data or str(typer.prompt("Data (mnist5k, digits, a folder, an .npz)", default="mnist5k", err=True)),
        model
        or str(typer.prompt("Model (cnn, resnet18, vit, module:callable)", default="resnet18", err=True)),
        max_accuracy_drop
        if max_accuracy_drop is not None
        else float(typer.prompt("Accuracy you would give for speed", default=0.01, type=float, err=True)),
    )


def write(file: Path, data: str, model: str, max_accuracy_drop: float) -> None:
    """Write a recipe of these answers and check it.

    Raises UsageError if the file exists; ConfigInvalid, and leaves no file, if an answer is wrong.
    """
    fields = {
        "data": _source(data),
        "train": {"model": model},
        "goals": {"max_accuracy_drop": max_accuracy_drop},
    }
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(yaml.safe_dump(fields, sort_keys=False))
    except FileExistsError:
        raise UsageError(f"{file} exists already", fix="give another name") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}", why=str(error)) from None
    try:
        recipe.load(file)
    except BaseException:
        file.unlink()
        raise


def _source(data: str) -> str | dict[str, str]:
    """A source's name as it is; a path by what it looks like."""
    if data in SOURCES:
        return data
    if data.endswith(".npz"):
        return {"source": "npz", "path": data}
    if data.endswith(_ARCHIVES):
        return {"source": "cifar10", "path": data}
    return {"source": "folder", "path": data}
