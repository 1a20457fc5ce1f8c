"""Labelled pictures, whatever holds their files, decoded into arrays on disk; any may be hostile."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal, Protocol, TypeVar

import numpy as np
from PIL import ExifTags, Image

from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.tasks.image_classification import pictures
from hpml.tasks.image_classification.data.arrays import new_images_file
from hpml.tasks.image_classification.data.checks import refuse
from hpml.tasks.image_classification.data.class_labels import ClassLabels
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview
from hpml.tasks.image_classification.data.picture_facts import FORMATS, MODES, MOST_PIXELS, POLICY, facts_of
from hpml.tasks.image_classification.picture_spec import PictureSpec

PROGRESS_EVERY = 500  # images
AT_ONCE = 64  # files that wait for a thread: what is held of them in memory is bounded
LYING = {5, 6, 7, 8}  # orientations in EXIF that exchange height and width


class Picture(Protocol):
    """A picture's file. label: the number of its class, or its name. name: for messages."""

    @property
    def name(self) -> str: ...

    @property
    def label(self) -> int | str: ...

    def file(self) -> pictures.File:
        """Where its bytes are; anew each time."""


P = TypeVar("P", bound=Picture)
T = TypeVar("T")
Pictures = Callable[[], Iterable[P]]  # of a split: gone through twice, always in the same order


def read_pictures(
    splits: Mapping[str, Pictures[Picture]],
    class_labels: ClassLabels,
    *,
    image_size: int | None,
    channels: int | None,
    out: Output,
) -> tuple[dict[str, Images], PictureSpec]:
    """The pictures of each split, in files in `out.scratch` and not in memory, and how they became pixels.

    `class_labels` is told of the labels. channels: None: one if every picture is grey. Raises StageFailed
    naming the pictures that are damaged or differ in size, and the splits that have none.
    """
    looked_at = {name: _look(name, files, class_labels, out) for name, files in splits.items()}
    first = next(iter(splits["train"]()))
    channels = channels or (1 if all(grey for _, _, grey in looked_at.values()) else 3)
    facts = _facts(first, channels, image_size)
    class_labels.resolve()
    images = {}
    for name, files in splits.items():
        codes, names, _ = looked_at[name]
        pixels = _decode(name, files(), len(names), facts, first.name, out)
        images[name] = Images(pixels, class_labels.numbers(codes), names)
    return images, facts


def headers(files: Iterable[Picture]) -> list[tuple[int, int, bool]]:
    """Of each picture height and width, once upright, and whether it is grey, by its header.

    Raises StageFailed naming those whose header is damaged.
    """
    return [header for _, header in for_each(files, _header)]


def preview_pictures(
    files: Iterable[Picture],
    *,
    classes: int,
    images: int,
    channels: int | None,
    left_out: tuple[str, ...] = (),
) -> PicturesPreview:
    """What the headers of some of `images` pictures say. Raises StageFailed naming those that are damaged."""
    heights, widths, greys = zip(*headers(files), strict=True)
    return PicturesPreview(
        class_count=classes,
        channels=channels or (1 if all(greys) else 3),
        smallest_hw=(min(heights), min(widths)),
        largest_hw=(max(heights), max(widths)),
        images=images,
        looked_at=len(greys),
        left_out=left_out,
    )


def for_each(
    files: Iterable[P], work: Callable[[P], T], out: Output | None = None, note: str = "", total: int = 0
) -> Iterator[tuple[P, T]]:
    """Each picture with what `work` made of it, on all threads of `out`, which is told of the progress.

    Few are held at a time. At the end raises StageFailed that lists all pictures for which `work` raised.
    """
    unusable = []

    def attempt(file: P) -> T | Exception:
        try:
            return work(file)
        except Exception as error:  # a decoder meets whatever a hostile file makes it meet
            return error

    count, remaining = 0, iter(files)
    with warnings.catch_warnings(), ThreadPoolExecutor(out.threads if out else 1) as pool:
        warnings.simplefilter("ignore")  # of Pillow's; what is too large is refused below
        while some := list(islice(remaining, AT_ONCE)):
            for file, result in zip(some, pool.map(attempt, some), strict=True):
                count += 1
                if isinstance(result, Exception):
                    unusable.append(f"{file.name} ({pictures.reason(result)})")
                else:
                    yield file, result
                if out and (count % PROGRESS_EVERY == 0 or count == total):
                    out.progress(count, max(count, total), "images", note)
    if unusable:
        fix = "replace or remove them; sizes may differ if image_size is set"
        refuse("images cannot be used", unusable, fix=fix, unit="file")


def _header(file: Picture) -> tuple[int, int, bool]:
    with Image.open(file.file(), formats=FORMATS) as image:
        pictures.require_usable(image, max_pixels=MOST_PIXELS)
        width, height = image.size
        lies = image.getexif().get(ExifTags.Base.Orientation) in LYING
        return *((width, height) if lies else (height, width)), image.mode in pictures.GREY_MODES


def _is_grey(file: Picture) -> bool:
    return pictures.is_grey(file.file(), formats=FORMATS, max_pixels=MOST_PIXELS)


def _look(
    split: str, files: Pictures[Picture], class_labels: ClassLabels, out: Output
) -> tuple[array[int], list[str], bool]:
    """The codes of the labels, the names, and whether all are grey."""
    codes, names, grey = array("q"), [], True
    for file, is_grey in for_each(files(), _is_grey, out, f"inspect {split}"):
        codes.append(class_labels.code(file.label))
        names.append(file.name)
        grey = grey and is_grey
    if not names:
        raise StageFailed(
            f"the split {split} has no pictures", fix="add some, or remove what names that split"
        )
    return codes, names, grey


def _facts(first: Picture, channels: int, image_size: int | None) -> PictureSpec:
    """How the files become pixels: as `image_size` asks, or all of the size of the first."""
    if image_size:
        size_hw = (image_size, image_size)
    else:
        policy = POLICY | {"mode": MODES[channels]}
        [(_, decoded)] = for_each([first], lambda file: pictures.decode(file.file(), policy))
        size_hw = (decoded.height, decoded.width)
    resize: Literal["shrink", "none"] = "shrink" if image_size else "none"
    return facts_of("pictures", channels, resize=resize, fit_within_hw=size_hw, size_hw=size_hw)


def _decode(
    split: str, files: Iterable[Picture], rows: int, facts: PictureSpec, first: str, out: Output
) -> np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]:
    height, width = facts.size_hw
    as_noted = facts.model_dump(mode="json")
    images = new_images_file(out.scratch / f"{split}_images.npy", (rows, height, width, len(facts.mode)))

    def pixels(file: Picture) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        image = pictures.decode(file.file(), as_noted)
        if facts.resize == "none" and image.size != (width, height):
            raise ValueError(f"{image.width}x{image.height} pixels, {first} has {width}x{height}")
        return pictures.fit(image, as_noted)

    for row, (_, decoded) in enumerate(for_each(files, pixels, out, f"decode {split}", rows)):
        images[row] = decoded
    return images
