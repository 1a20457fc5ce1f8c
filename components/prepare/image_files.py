"""Labelled images out of a folder of PNG and JPEG files, any of which may be damaged or hostile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from components.contract import Output
from components.errors import StageFailed
from components.prepare.arrays import new_images_file
from components.prepare.checks import refuse
from components.prepare.sources.base import Images

FORMATS = ("PNG", "JPEG")
MOST_PIXELS = 50_000_000  # of one image; a file of a few kilobytes can claim billions
SPLIT_NAMES = {"train", "test"}
LOOKS_LIKE_A_SPLIT = SPLIT_NAMES | {"val", "validation"}
GREY_MODES = {"1", "L", "LA"}
COLOUR_MODES = {"P", "RGB", "RGBA", "CMYK"}
PROGRESS_EVERY = 500  # images

T = TypeVar("T")


@dataclass(frozen=True)
class LabelledFile:
    """An image file, its path below the root, and the number of its class."""

    path: Path
    name: str
    label: int


def read_image_folder(
    root: Path, *, image_size: int | None, channels: int | None, out: Output
) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Train images, test images if the folder has its own split, and class names.

    Raises StageFailed naming the files that are no images, are damaged or differ in size.
    """
    root = _unwrap(root)
    class_names, splits = _list_splits(root)
    files = [file for split in splits.values() for file in split]
    if not files:
        raise StageFailed(f"{root} has no images", why="a folder of PNG or JPEG files per class is needed")
    grey = _for_each(files, lambda row: _is_grey(files[row].path), out, "inspect")
    mode = {1: "L", 3: "RGB"}[channels or (1 if all(grey) else 3)]
    images = {name: _read_images(name, split, mode, image_size, out) for name, split in splits.items()}
    return images["train"], images.get("test"), class_names


# ------------------------------------------------------------------------------------------------ the folders


def _entries(folder: Path) -> list[Path]:
    """What is in `folder`, sorted, without hidden files and what macOS adds to an archive."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX")


def _unwrap(root: Path) -> Path:
    """An archive often holds one folder that holds the rest, and one class alone would be of no use."""
    entries = _entries(root)
    while len(entries) == 1 and entries[0].is_dir():
        root = entries[0]
        entries = _entries(root)
    return root


def _list_splits(root: Path) -> tuple[tuple[str, ...], dict[str, list[LabelledFile]]]:
    """The class names, and the files of `train` and, if the folder has its own split, of `test`."""
    top = _folder_names(root)
    if not LOOKS_LIKE_A_SPLIT & set(top):
        return tuple(top), {"train": _list_files(root, root, top)}
    if set(top) != SPLIT_NAMES:
        raise StageFailed(
            f"{root} has the folders {', '.join(top)}",
            why="allowed are a folder per class, or train and test with a folder per class in each",
            fix="move what belongs together into train and test",
        )
    class_names = _folder_names(root / "train")
    unknown = sorted(set(_folder_names(root / "test")) - set(class_names))
    if unknown:
        refuse(
            "test has classes that train has not",
            unknown,
            fix="add them to train or remove them",
            unit="class",
        )
    return tuple(class_names), {
        "train": _list_files(root, root / "train", class_names),
        "test": _list_files(root, root / "test", class_names),
    }


def _folder_names(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted; nothing else may be in it."""
    entries = _entries(folder)
    strays = [path.name for path in entries if not path.is_dir()]
    if strays:
        refuse(f"{folder} holds files beside its folders", strays, fix="move or remove them", unit="file")
    return [path.name for path in entries]


def _list_files(root: Path, split: Path, class_names: Sequence[str]) -> list[LabelledFile]:
    """The files of every class of a split, in the order of class and name."""
    files = [
        LabelledFile(path, str(path.relative_to(root)), label)
        for label, class_name in enumerate(class_names)
        if (split / class_name).is_dir()
        for path in _entries(split / class_name)
    ]
    folders = [file.name for file in files if file.path.is_dir()]
    if folders:
        refuse(
            "a class's folder holds folders",
            folders,
            fix="put the images into the class's folder",
            unit="folder",
        )
    return files


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
            return _Unusable(_reason(error))

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
        refuse(
            "images cannot be used",
            unusable,
            fix="replace or remove them; sizes may differ if image_size is set",
            unit="file",
        )
    return done


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "no PNG or JPEG"
    return " ".join(str(error).split())[:100] or type(error).__name__


def _is_grey(path: Path) -> bool:
    """Whether an image is grey. Checks what can be checked without decoding it: format, size, chunk sums."""
    with Image.open(path, formats=FORMATS) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width}x{height} are more than {MOST_PIXELS} pixels")
        if image.mode not in GREY_MODES | COLOUR_MODES:
            raise ValueError(f"mode {image.mode}, 8 bits per channel are read")
        image.verify()
        return image.mode in GREY_MODES


def _read_images(
    split: str, files: list[LabelledFile], mode: str, image_size: int | None, out: Output
) -> Images:
    """The decoded images of a split, in a file in `out.scratch` rather than in memory."""
    channels = len(mode)
    if image_size:
        size_wh = (image_size, image_size)
    elif files:
        size_wh = _for_each(files[:1], lambda row: _decode(files[row].path, mode).size, out, "decode")[0]
    else:
        size_wh = (1, 1)
    shape = (len(files), size_wh[1], size_wh[0], channels)
    images = new_images_file(out.scratch / f"{split}_images.npy", shape)

    def fill(row: int) -> None:
        image = _decode(files[row].path, mode)
        if image_size:
            image = _fit(image, image_size)
        elif image.size != size_wh:
            raise ValueError(f"{_size(image.size)} pixels, {files[0].name} has {_size(size_wh)}")
        images[row] = np.asarray(image).reshape(shape[1:])

    _for_each(files, fill, out, "decode")
    labels = np.array([file.label for file in files], dtype=np.int64)
    return Images(images, labels, [file.name for file in files])


def _size(size_wh: tuple[int, int]) -> str:
    return f"{size_wh[0]}x{size_wh[1]}"


def _decode(path: Path, mode: str) -> Image.Image:
    """The image upright, what is transparent on black, in `mode`."""
    with Image.open(path, formats=FORMATS) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return image.convert(mode)


def _fit(image: Image.Image, side: int) -> Image.Image:
    """`image` in the middle of a black square, shrunk in proportion if it is larger."""
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    square = Image.new(image.mode, (side, side))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
