"""Labelled images out of a folder of PNG and JPEG files, any of which may be damaged or hostile."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar, cast

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
    grey = _for_each(files, _is_grey, out, "inspect")
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
    heights, widths, modes = zip(*_for_each(chosen, _header), strict=True)
    return Preview(
        class_count=len(folder.class_names),
        channels=channels or (1 if pictures.GREY_MODES.issuperset(modes) else 3),
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


def _header(file: LabelledFile) -> tuple[int, int, str]:
    """Height and width, once upright, and mode of an image. Raises what the decoder raises, PictureError."""
    with Image.open(file.path, formats=FORMATS) as image:
        pictures.require_usable(image, max_pixels=MOST_PIXELS)
        width, height = image.size
        lies = image.getexif().get(ExifTags.Base.Orientation) in LYING
        return (width, height, image.mode) if lies else (height, width, image.mode)


# ------------------------------------------------------------------------------------------------- the images


def _for_each(
    files: list[LabelledFile], work: Callable[[LabelledFile], T], out: Output | None = None, note: str = ""
) -> list[T]:
    """`work` on every file, on all threads of `out`, which is told of the progress, or on one.

    Raises StageFailed that lists all files for which `work` raised.
    """
    unusable = {}

    def attempt(file: LabelledFile) -> T | None:
        try:
            return work(file)
        except Exception as error:  # a decoder meets whatever a hostile file makes it meet
            unusable[file.name] = pictures.reason(error)
            return None

    done = []
    with warnings.catch_warnings(), ThreadPoolExecutor(out.threads if out else 1) as pool:
        warnings.simplefilter("ignore")  # of Pillow's; what is too large is refused below
        for count, result in enumerate(pool.map(attempt, files), start=1):
            done.append(result)
            if out and (count % PROGRESS_EVERY == 0 or count == len(files)):
                out.progress(count, len(files), "images", note)
    if unusable:
        refuse(
            "images cannot be used",
            [f"{file.name} ({unusable[file.name]})" for file in files if file.name in unusable],
            fix="replace or remove them; sizes may differ if image_size is set",
            unit="file",
        )
    return cast(list[T], done)


def _is_grey(file: LabelledFile) -> bool:
    return pictures.is_grey(file.path, formats=FORMATS, max_pixels=MOST_PIXELS)


def _facts(files: list[LabelledFile], channels: int, image_size: int | None, out: Output) -> PictureSpec:
    """How the files become pixels: as `image_size` asks, or all of the size of the first."""
    if image_size:
        size_hw = (image_size, image_size)
    else:
        policy = POLICY | {"mode": MODES[channels]}
        [first] = _for_each(files[:1], lambda file: pictures.decode(file.path, policy), out, "decode")
        size_hw = (first.height, first.width)
    resize: Literal["shrink", "none"] = "shrink" if image_size else "none"
    return facts_of("pictures", channels, resize=resize, fit_within_hw=size_hw, size_hw=size_hw)


def _read_images(
    split: str, files: list[LabelledFile], facts: PictureSpec, first: LabelledFile, out: Output
) -> Images:
    """The decoded images of a split, in a file in `out.scratch` rather than in memory."""
    height, width = facts.size_hw
    as_noted = facts.model_dump(mode="json")
    shape = (len(files), height, width, len(facts.mode))
    images = new_images_file(out.scratch / f"{split}_images.npy", shape)
    rows = {file.name: row for row, file in enumerate(files)}

    def fill(file: LabelledFile) -> None:
        image = pictures.decode(file.path, as_noted)
        if facts.resize == "none" and image.size != (width, height):
            raise ValueError(f"{image.width}x{image.height} pixels, {first.name} has {width}x{height}")
        images[rows[file.name]] = pictures.fit(image, as_noted)

    _for_each(files, fill, out, "decode")
    labels = np.array([file.label for file in files], dtype=np.int64)
    return Images(images, labels, [file.name for file in files])
