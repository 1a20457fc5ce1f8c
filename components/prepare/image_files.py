"""Labelled images out of a folder of PNG and JPEG files, any of which may be damaged or hostile."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from PIL import ExifTags, Image

from hpml.artifacts.model_input import PictureSpec
from hpml.components.prepare.arrays import new_images_file
from hpml.components.prepare.checks import refuse
from hpml.components.prepare.image_folders import ImageFolder, LabelledFile, list_images
from hpml.components.prepare.picture_facts import FORMATS, MODES, MOST_PIXELS, POLICY, facts_of
from hpml.components.prepare.sources.base import Images, Preview
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.tasks import pictures

PROGRESS_EVERY = 500  # images
MOST_LOOKED_AT = 2_000  # images of which a preview reads the header
LYING = {5, 6, 7, 8}  # orientations in EXIF that exchange height and width

T = TypeVar("T")


def read_image_folder(
    root: Path, *, image_size: int | None, channels: int | None, out: Output
) -> tuple[Images, Images | None, ImageFolder, PictureSpec]:
    """Train images, test images if the folder has its own split, what lies in it, how files became pixels.

    Raises StageFailed naming the images that are damaged, differ in size, or lie where none should be, and
    the classes that have too few.
    """
    folder, files = _labelled(root)
    grey = _for_each(files, lambda row: _is_grey(files[row].path), out, "inspect")
    channels = channels or (1 if all(grey) else 3)
    facts = _facts(files, channels, image_size, out)
    images = {name: _read_images(name, split, facts, files[0], out) for name, split in folder.splits.items()}
    return images["train"], images.get("test"), folder, facts


def preview_image_folder(root: Path, *, channels: int | None) -> Preview:
    """What names and headers say: of all images, or of MOST_LOOKED_AT of them, evenly chosen.

    Raises StageFailed naming the images whose headers are damaged or that lie where none should be, and the
    classes that have too few.
    """
    folder, files = _labelled(root)
    chosen = files[:: math.ceil(len(files) / MOST_LOOKED_AT)]
    headers, unusable = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in chosen:
            try:
                headers.append(_header(file.path))
            except Exception as error:  # a decoder meets whatever a hostile file makes it meet
                unusable.append(f"{file.name} ({pictures.reason(error)})")
    if unusable:
        _refuse_images(unusable)
    heights, widths = [height for height, _, _ in headers], [width for _, width, _ in headers]
    return Preview(
        class_count=len(folder.class_names),
        channels=channels or (1 if all(mode in pictures.GREY_MODES for _, _, mode in headers) else 3),
        smallest_hw=(min(heights), min(widths)),
        largest_hw=(max(heights), max(widths)),
        images=len(files),
        looked_at=len(chosen),
        left_out=folder.left_out,
    )


def _labelled(root: Path) -> tuple[ImageFolder, list[LabelledFile]]:
    """What lies in `root`, and all images in it. Refuses a class without an image for each split."""
    folder = list_images(root)
    files = [file for split in folder.splits.values() for file in split]
    if not files:
        raise StageFailed(f"{root} has no images", why="a folder of PNG or JPEG files per class is needed")
    least = 1 if "test" in folder.splits else 2  # prepare makes both splits of one
    too_few = []
    for name, split in folder.splits.items():
        counts = Counter(file.label for file in split)
        above = f"{name}/" if "test" in folder.splits else ""
        too_few += [
            f"{above}{class_name} ({counts[label] or 'no'} image{'s' if not counts[label] else ''})"
            for label, class_name in enumerate(folder.class_names)
            if counts[label] < least
        ]
    if too_few:
        refuse(
            "classes have too few images",
            too_few,
            fix="add images, at least one of a class for each split, or remove the class's folder",
            unit="folder",
        )
    return folder, files


def _header(file: Path) -> tuple[int, int, str]:
    """Height and width, once upright, and mode of an image. Raises what the decoder raises, PictureError."""
    with Image.open(file, formats=FORMATS) as image:
        pictures.require_usable(image, max_pixels=MOST_PIXELS)
        width, height = image.size
        lies = image.getexif().get(ExifTags.Base.Orientation) in LYING
        return (width, height, image.mode) if lies else (height, width, image.mode)


# ------------------------------------------------------------------------------------------------- the images


@dataclass(frozen=True)
class _Unusable:
    reason: str


def _for_each(files: list[LabelledFile], work: Callable[[int], T], out: Output, note: str) -> list[T]:
    """`work` on the number of every file, on all threads.

    Raises StageFailed that lists all files for which `work` raised.
    """
    done: list[T] = []
    unusable = []

    def attempt(row: int) -> T | _Unusable:
        try:
            return work(row)
        except Exception as error:  # a decoder meets whatever a hostile file makes it meet
            return _Unusable(pictures.reason(error))

    with warnings.catch_warnings(), ThreadPoolExecutor(out.threads) as pool:
        warnings.simplefilter("ignore")  # of Pillow's; what is too large is refused below
        for row, result in enumerate(pool.map(attempt, range(len(files)))):
            if isinstance(result, _Unusable):
                unusable.append(f"{files[row].name} ({result.reason})")
            else:
                done.append(result)
            if (row + 1) % PROGRESS_EVERY == 0 or row + 1 == len(files):
                out.progress(row + 1, len(files), "images", note)
    if unusable:
        _refuse_images(unusable)
    return done


def _refuse_images(unusable: list[str]) -> NoReturn:
    fix = "replace or remove them; sizes may differ if image_size is set"
    refuse("images cannot be used", unusable, fix=fix, unit="file")


def _is_grey(path: Path) -> bool:
    return pictures.is_grey(path, formats=FORMATS, max_pixels=MOST_PIXELS)


def _facts(files: list[LabelledFile], channels: int, image_size: int | None, out: Output) -> PictureSpec:
    """How the files become pixels: as `image_size` asks, or all of the size of the first."""
    if image_size:
        size_hw = (image_size, image_size)
        return facts_of("pictures", channels, resize="shrink", fit_within_hw=size_hw, size_hw=size_hw)
    mode = {"mode": MODES[channels]}
    [(width, height)] = _for_each(
        files[:1], lambda row: pictures.decode(files[row].path, POLICY | mode).size, out, "decode"
    )
    size_hw = (height, width)
    return facts_of("pictures", channels, resize="none", fit_within_hw=size_hw, size_hw=size_hw)


def _read_images(
    split: str, files: list[LabelledFile], facts: PictureSpec, first: LabelledFile, out: Output
) -> Images:
    """The decoded images of a split, in a file in `out.scratch` rather than in memory."""
    height, width = facts.size_hw
    as_noted = facts.model_dump(mode="json")
    shape = (len(files), height, width, len(facts.mode))
    images = new_images_file(out.scratch / f"{split}_images.npy", shape)

    def fill(row: int) -> None:
        image = pictures.decode(files[row].path, as_noted)
        if facts.resize == "none" and image.size != (width, height):
            raise ValueError(f"{image.width}x{image.height} pixels, {first.name} has {width}x{height}")
        images[row] = pictures.fit(image, as_noted)

    _for_each(files, fill, out, "decode")
    labels = np.array([file.label for file in files], dtype=np.int64)
    return Images(images, labels, [file.name for file in files])
