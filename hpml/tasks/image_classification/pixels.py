"""From stored images to what a network takes, in numpy, the same for every runtime."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Normalised(Protocol):
    """What says how the pixels of images are normalised, per channel, and the shape of an image."""

    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...

    @property
    def shape_chw(self) -> tuple[int, int, int]: ...


def to_x_nchw(images_nhwc: NDArray[np.uint8], task: Normalised) -> NDArray[np.float32]:
    """(pixel / 255 - mean) / std, float32, contiguous (batch, channels, height, width)."""
    mean = np.asarray(task.mean, np.float32)
    std = np.asarray(task.std, np.float32)
    scaled = (images_nhwc.astype(np.float32) / np.float32(255) - mean) / std
    x_nchw = np.empty((len(scaled), *task.shape_chw), np.float32)
    x_nchw[:] = scaled.transpose(0, 3, 1, 2)  # a view of one channel counts as contiguous, with NHWC strides
    return x_nchw
