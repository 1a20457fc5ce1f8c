"""Labelled images out of a folder of IDX files, which are named as MNIST's are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpml.core.errors import StageFailed
from hpml.data_files.idx import IdxFile
from hpml.data_files.split_names import by_split
from hpml.tasks.image_classification.data.class_labels import ClassLabels
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview, RowNames


def read_idx_folder(root: Path, class_labels: ClassLabels, scratch: Path) -> dict[str, Images]:
    """The images of each split, mapped from their files; `class_labels` is told of the labels.

    Raises StageFailed if files are missing, damaged, or do not belong together.
    """
    files, codes = _files(root), {}
    for split, (_, labels) in files.items():
        codes[split] = [class_labels.code(int(label)) for label in labels.read()]
    class_labels.resolve()
    images = {}
    for split, (pixels, _) in files.items():
        mapped = pixels.mapped(scratch)
        images_nhwc = mapped[..., np.newaxis] if mapped.ndim == 3 else mapped
        names = RowNames(f"{pixels.path.name} row", len(mapped))
        images[split] = Images(images_nhwc, class_labels.numbers(codes[split]), names)
    return images


def preview_idx_folder(root: Path, *, classes: int) -> PicturesPreview:
    """What the headers say, and, where `classes` is 0, the labels. Raises StageFailed as reading does."""
    files = _files(root)
    shape = files["train"][0].shape
    classes = classes or 1 + max(int(labels.read().max()) for _, labels in files.values())
    rows = sum(pixels.shape[0] for pixels, _ in files.values())
    size_hw = (shape[1], shape[2])
    channels = shape[3] if len(shape) == 4 else 1
    return PicturesPreview(classes, channels, size_hw, size_hw, images=rows, looked_at=rows)


def _files(root: Path) -> dict[str, tuple[IdxFile, IdxFile]]:
    """Images and labels of each split."""
    names = [
        file.relative_to(root).as_posix() for file in sorted(root.rglob("*")) if "idx" in file.name.lower()
    ]
    splits = by_split(names)
    if not splits:
        raise StageFailed(
            f"{root} has no IDX files",
            why="none has idx in its name, as in train-images-idx3-ubyte.gz",
            fix="give the folder of the images and labels, gzipped or not",
        )
    return {split: tuple(_pair(root, split, of_split)) for split, of_split in splits.items()}  # type: ignore[misc]


def _pair(root: Path, split: str, names: list[str]) -> Iterator[IdxFile]:
    """The images, then the labels."""
    files = {}
    for content in ("images", "labels"):
        found = [name for name in names if content in name.lower()]
        if len(found) != 1:
            many = f"{len(found)} IDX files" if found else "no IDX file"
            raise StageFailed(
                f"{root} has {many} with the {content} of {split}",
                why=f"of {split} it has {', '.join(names)}",
                fix=f"have one file with {content!r} in its name for each split",
            )
        files[content] = IdxFile(root / found[0])
    images, labels = files["images"], files["labels"]
    shape = images.shape
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)) or 0 in shape:
        raise StageFailed(
            f"{images.path} has the sizes {shape}",
            why="allowed are (rows, height, width) and (rows, height, width, 1 or 3), none of them 0",
        )
    if labels.shape != shape[:1]:
        raise StageFailed(
            f"{images.path} and {labels.path.name} do not belong together",
            why=f"there are {shape[0]} images, and labels of the sizes {labels.shape}",
        )
    yield from (images, labels)
