"""What prepare does to whole arrays of images: padding, statistics, writing a split."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.core.mapped_rows import parts, take
from hpml.tasks.image_classification.data.splits import Split


def padded_shape(shape_hwc: tuple[int, int, int], image_size: int | None) -> tuple[int, int, int]:
    """The shape (height, width, channels) of images once padded to a square of `image_size`.

    Raises ConfigInvalid if the images are larger than that.
    """
    height, width, channels = shape_hwc
    if image_size is None:
        return shape_hwc
    if max(height, width) > image_size:
        raise ConfigInvalid(
            f"image_size {image_size} is smaller than the images of the source",
            why=f"they are {height}x{width}",
            fix=f"leave image_size out or set it to {max(height, width)} or more",
        )
    return image_size, image_size, channels


def new_images_file(file: Path, shape_nhwc: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """A new `.npy` file of black images, mapped into memory.

    Raises OSError at once, and not in the middle of writing, if the disk has too little room.
    """
    images = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape_nhwc)
    with file.open("r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return images


def write_split(split: Split, name: str, shape_hwc: tuple[int, int, int], folder: Path) -> None:
    """Write `<name>_images.npy`, uint8 NHWC padded with black around to `shape_hwc`, and `<name>_labels.npy`.

    Works in parts: neither the source's images nor the result need to fit into memory.
    """
    source = split.images.images_nhwc
    height, width = source.shape[1:3]
    top, left = (shape_hwc[0] - height) // 2, (shape_hwc[1] - width) // 2
    images = new_images_file(folder / f"{name}_images.npy", (len(split.rows), *shape_hwc))
    for part in parts(images):
        images[part, top : top + height, left : left + width] = take(source, split.rows[part])
    np.save(folder / f"{name}_labels.npy", split.labels.astype(np.int64))


def channel_statistics(images_file: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixel / 255 per channel, exact, over an array of images NHWC.

    Raises StageFailed if a channel is constant: it carries nothing, and cannot be normalised.
    """
    images = np.load(images_file, mmap_mode="r", allow_pickle=False)
    counts = np.zeros((images.shape[-1], 256), dtype=np.int64)
    for part in parts(images):
        for channel, of_channel in enumerate(counts):
            of_channel += np.bincount(images[part][..., channel].ravel(), minlength=256)
    for channel, of_channel in enumerate(counts):
        if np.count_nonzero(of_channel) == 1:
            level = of_channel.argmax()
            raise StageFailed(
                f"the data is refused, channel {channel} is {level} in every pixel of the train split",
                fix="use images that show something, or leave the channel out",
            )
    means, stds = zip(*map(_moments, counts.tolist()), strict=True)
    return means, stds


def _moments(counts: list[int]) -> tuple[float, float]:
    """Mean and standard deviation of level / 255, given how many pixels have each level.

    In whole numbers up to the last division, so that no library's order of summation changes a digit.
    """
    pixels = sum(counts)
    total = sum(level * count for level, count in enumerate(counts))
    squares = sum(level**2 * count for level, count in enumerate(counts))
    mean = total / (255 * pixels)
    variance = (pixels * squares - total**2) / (255 * pixels) ** 2
    return mean, math.sqrt(variance)
