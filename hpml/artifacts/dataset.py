"""The dataset that `prepare` writes."""

from __future__ import annotations

from typing import Literal

from hpml.artifacts.model_input import PictureSpec
from hpml.core.contract import Config


class SplitSpec(Config):
    """One split of a dataset: `<split>_images.npy` uint8 NHWC and `<split>_labels.npy` int64."""

    rows: int
    class_counts: tuple[int, ...]


class DatasetSpec(Config):
    """A labelled image set as memory-mappable arrays; splits are named `train` and `test`."""

    kind: Literal["dataset"] = "dataset"
    class_names: tuple[str, ...]
    image_shape_hwc: tuple[int, int, int]
    splits: dict[str, SplitSpec]
    mean: tuple[float, ...]  # per channel, of pixel / 255 over the train split
    std: tuple[float, ...]
    source: str
    licence: str
    notes: tuple[str, ...] = ()  # what was left out of the source, and why
    pictures: PictureSpec | None = None  # None in artifacts of before this was noted
