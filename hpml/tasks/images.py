"""From stored images to what a model takes, in numpy, the same for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model_input import InputSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


def load_split(data: Artifact[DatasetSpec], split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 (rows, height, width, channels), memory-mapped, and labels int64 (rows,) of a split."""
    images = np.load(data.file(f"{split}_images.npy"), mmap_mode="r", allow_pickle=False)
    labels = np.load(data.file(f"{split}_labels.npy"), allow_pickle=False)
    return images, labels


def to_x_nchw(images_nhwc: NDArray[np.uint8], spec: InputSpec) -> NDArray[np.float32]:
    """(pixel / 255 - mean) / std, float32, contiguous (batch, channels, height, width)."""
    mean = np.asarray(spec.mean, np.float32)
    std = np.asarray(spec.std, np.float32)
    scaled = (images_nhwc.astype(np.float32) / np.float32(255) - mean) / std
    x_nchw = np.empty((len(scaled), *spec.shape_chw), np.float32)
    x_nchw[:] = scaled.transpose(0, 3, 1, 2)  # a view of one channel counts as contiguous, with NHWC strides
    return x_nchw


def batches(rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` rows that cover `rows`."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def predict_split(
    predict: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    images_nhwc: NDArray[np.uint8],
    spec: InputSpec,
) -> NDArray[np.float32]:
    """Logits (rows, classes) of `predict` over all `images_nhwc`, in batches."""
    return np.concatenate(
        [predict(to_x_nchw(images_nhwc[part], spec)) for part in batches(len(images_nhwc), 100)]
    )


def top1_accuracy(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """The share of rows whose largest logit is the label's."""
    return float((logits.argmax(axis=1) == labels).mean())
