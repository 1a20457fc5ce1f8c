"""Labelled images out of a folder of PNG and JPEG files, any of which may be damaged or hostile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.data_files.split_names import SPLITS
from hpml.tasks.image_classification.data.checks import refuse
from hpml.tasks.image_classification.data.class_labels import ClassLabels
from hpml.tasks.image_classification.data.image_folders import ImageFolder, LabelledFile, list_images
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview
from hpml.tasks.image_classification.data.read_pictures import preview_pictures, read_pictures
from hpml.tasks.image_classification.picture_spec import PictureSpec

MOST_LOOKED_AT = 2_000  # images of which a preview reads the header


def read_image_folder(
    root: Path, *, image_size: int | None, channels: int | None, out: Output
) -> tuple[dict[str, Images], ImageFolder, PictureSpec]:
    """The images of each split that the folder has, what lies in it, how files became pixels.

    Raises StageFailed naming the images that are damaged, differ in size, or lie where none should be, and
    the classes that have too few.
    """
    folder, _ = _labelled(root)
    splits: dict[str, Callable[[], Sequence[LabelledFile]]] = {
        name: partial(list, files) for name, files in folder.splits.items()
    }
    class_labels = ClassLabels(folder.class_names)
    images, facts = read_pictures(splits, class_labels, image_size=image_size, channels=channels, out=out)
    return images, folder, facts


def preview_image_folder(root: Path, *, channels: int | None) -> PicturesPreview:
    """What names and headers say: of all images, or of MOST_LOOKED_AT of them, evenly chosen.

    Raises StageFailed naming the images whose headers are damaged or that lie where none should be, and the
    classes that have too few.
    """
    folder, files = _labelled(root)
    return preview_pictures(
        files[:: math.ceil(len(files) / MOST_LOOKED_AT)],
        classes=len(folder.class_names),
        images=len(files),
        channels=channels,
        left_out=folder.left_out,
    )


def _labelled(root: Path) -> tuple[ImageFolder, list[LabelledFile]]:
    """What lies in `root`, and all images in it. Refuses a class without an image for each split."""
    folder = list_images(root)
    files = [file for split in folder.splits.values() for file in split]
    if not files:
        raise StageFailed(f"{root} has no images", why="a folder of PNG or JPEG files per class is needed")
    too_few = []
    for name, split in folder.splits.items():
        least = (
            1 + len(SPLITS) - len(folder.splits) if name == "train" else 1
        )  # prepare makes what is lacking
        counts = Counter(file.label for file in split)
        above = f"{name}/" if len(folder.splits) > 1 else ""
        too_few += [
            f"{above}{class_name} ({counts[label] or 'no'} image{'s' if counts[label] != 1 else ''})"
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
