"""Writes a new recipe from three answers: data, model, goals."""

from __future__ import annotations

import difflib
import math
import os
import sys
from pathlib import Path
from typing import Any

import typer

from hpml.core import strict_yaml
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, StageFailed, UsageError
from hpml.pipelines import recipe
from hpml.tasks import SOURCES, AnySource
from hpml.tasks.image_classification.data.loaded import PicturesPreview

_ARCHIVES = (".tar.gz", ".tgz", ".zip", ".tar")
_LARGEST_SIDE = 64  # of images that a recipe begins with: our networks, and CPUs, are for small ones
_SMALLEST_SIDE = 4
_VIT_PATCH = 4  # its images are cut into squares of this side
_VIT_SIDE = 32  # what it takes unless told otherwise


def ask(data: str, model: str, max_accuracy_drop: float | None) -> tuple[str, str, float]:
    """The three answers: those given, the others asked for on a terminal.

    Raises UsageError naming the flags where there is nobody to ask.
    """
    given = {"--data": data, "--model": model, "--max-accuracy-drop": max_accuracy_drop}
    missing = [flag for flag, answer in given.items() if answer in ("", None)]
    if missing and not sys.stdin.isatty():
        raise UsageError(f"init needs {', '.join(missing)}", why="there is no terminal to ask on")
    data = data or typer.prompt("Data (mnist5k, digits, a folder, an .npz)", default="mnist5k", err=True)
    model = model or typer.prompt("Model (cnn, resnet18, vit, module:callable)", default="resnet18", err=True)
    if max_accuracy_drop is None:
        question = "Top-1 you would trade for speed (0.01: one point)"
        max_accuracy_drop = float(typer.prompt(question, default=0.01, type=float, err=True))
    return data, model, max_accuracy_drop


def write(file: Path, data: str, model: str, max_accuracy_drop: float) -> tuple[str, ...]:
    """Write a recipe of these answers, with an image size that suits them, and check it.

    Returns what the user should know of the data. Raises UsageError if the file exists; ConfigInvalid, and
    leaves no file, if an answer is wrong.
    """
    if file.exists():
        raise UsageError(f"{file} exists already", fix="give another name")
    source = _source(data)
    preview = _preview(source)
    side = _side(source, model, preview)
    if "path" in source and "://" not in data:  # paths in a recipe are relative to it
        source["path"] = os.path.relpath(data, file.parent) if not Path(data).is_absolute() else data
    if side:
        source["image_size"] = side
    fields = {
        "data": source if len(source) > 1 else source["source"],
        "train": {"model": _model(model, side or (max(preview.largest_hw) if preview else _VIT_SIDE))},
        "goals": {"max_quality_loss": max_accuracy_drop},
    }
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(strict_yaml.dump(fields))
    except OSError as error:
        raise UsageError(f"cannot write {file}", why=error.strerror or str(error)) from None
    try:
        recipe.load(file)
    except BaseException:
        file.unlink()
        raise
    return _remarks(preview, side) if preview else ()


def _source(data: str) -> dict[str, Any]:
    """The fields of a source: its name, or a path by what it looks like.

    Raises ConfigInvalid if there is nothing at the path.
    """
    if data in SOURCES:
        return {"source": data}
    kind = "npz" if data.endswith(".npz") else "cifar10" if data.endswith(_ARCHIVES) else "folder"
    if "://" not in data and not os.path.lexists(data):
        near = difflib.get_close_matches(data[:80], SOURCES, n=1)
        raise ConfigInvalid(
            f"there is no data {data!r}",
            why=f"did you mean {near[0]!r}?" if near else "there is no such file or folder here",
            fix=f"give a folder, an .npz, an archive, or one of {', '.join(SOURCES)}",
        )
    return {"source": kind, "path": data}


def _preview(source: dict[str, Any]) -> PicturesPreview | None:
    """What is known of the data at once. Raises ConfigInvalid for data that cannot be used."""
    config: Any = validate(AnySource, source, where="the data")
    unsupported_reason = config.unsupported_reason()
    if unsupported_reason and "path" in source:
        raise ConfigInvalid("the data cannot be used", why=unsupported_reason)
    try:
        found: PicturesPreview | None = config.preview_pictures()
    except StageFailed as error:  # what a stage cannot use, an answer should not name
        raise ConfigInvalid(error.what, why=error.why, fix=error.fix) from None
    return found


def _side(source: dict[str, Any], model: str, preview: PicturesPreview | None) -> int | None:
    """The `image_size` to write; None where the source's own does."""
    is_folder = source["source"] == "folder"  # the only one whose images can be shrunk
    if preview is None or source["source"] == "mnist5k" or not (is_folder or model == "vit"):
        return None  # mnist5k is 32 by itself
    side = min(max(preview.largest_hw), _LARGEST_SIDE) if is_folder else max(preview.largest_hw)
    side = max(side, _SMALLEST_SIDE)
    return side if model != "vit" else math.ceil(side / _VIT_PATCH) * _VIT_PATCH


def _model(name: str, side: int) -> str | dict[str, Any]:
    if name != "vit" or side == _VIT_SIDE:
        return name
    return {"architecture": name, "arguments": {"image_size": side}}


def _remarks(preview: PicturesPreview, side: int | None) -> tuple[str, ...]:
    remarks = []
    if preview.images:
        low, high = (f"{width}x{height}" for height, width in (preview.smallest_hw, preview.largest_hw))
        sizes = f"of {high}" if low == high else f"of {low} to {high}"
        colour = "grey" if preview.channels == 1 else "colour"
        remarks.append(
            f"{preview.class_count} classes, {preview.images} images, {colour}, {sizes} (width x height)"
        )
        if preview.looked_at < preview.images:
            remarks.append(f"sizes are those of {preview.looked_at} of the images")
        if side and side < max(preview.largest_hw):
            remarks.append(
                f"image_size {side} shrinks the larger ones: raise it for detail, at the cost of time"
            )
    if preview.left_out:
        from hpml.core.words import counted

        remarks.append(f"left out, as no images: {counted(preview.left_out, 'file')}")
    return tuple(remarks)
