"""What every data source is: a config that loads labelled images as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpml.core.contract import Config, Output

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpml.artifacts.model_input import PictureSpec


@dataclass(frozen=True)
class Images:
    """Labelled images: uint8 (rows, height, width, channels), in memory or memory-mapped, and int64 (rows,).

    names: what the owner of the images calls each row, such as a file name; for messages.
    """

    images_nhwc: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: Sequence[str]


@dataclass(frozen=True)
class Loaded:
    """What a source delivers. `test` is None where the source has no split of its own: prepare makes one.

    pictures: how files became these images; None where the source has arrays.
    left_out: the names of what the source holds beside its images.
    """

    train: Images
    test: Images | None
    class_names: tuple[str, ...]
    licence: str
    pictures: PictureSpec | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preview:
    """What is known of a source's images before they are read.

    images: how many there are, of which `looked_at` were looked at; grey if `channels` is 1. smallest_hw and
    largest_hw: their heights and widths. left_out: as in Loaded.
    """

    class_count: int
    channels: int
    smallest_hw: tuple[int, int]
    largest_hw: tuple[int, int]
    images: int = 0
    looked_at: int = 0
    left_out: tuple[str, ...] = ()

    def shape_chw(self, image_size: int | None) -> tuple[int, int, int] | None:
        """Of the images once prepared; None where they would be refused."""
        if image_size:
            return self.channels, image_size, image_size
        if self.smallest_hw != self.largest_hw:
            return None
        return self.channels, *self.largest_hw


class Source(Config, ABC):
    """Base of the sources. A subclass adds `source: Literal["its-name"]`, its options, and `load`."""

    source: str
    image_size: int | None = Field(default=None, ge=4, le=1024)  # pad to this square; None: as they are
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # where the source has no test split of its own
    seed: int = Field(default=0, ge=0)  # of that split
    # What to do about an image that is in both splits, or under two labels. "drop" leaves the first out of
    # the train split and the second out altogether, and says so in the dataset's notes.
    duplicates: Literal["refuse", "drop"] = "refuse"

    @property
    def reads_unpinned_data(self) -> bool:
        """Whether it names the data by a path or URL, without a digest."""
        address = getattr(self, "path", None) or getattr(self, "url", None)
        return bool(address) and not getattr(self, "sha256", None)

    def preview(self) -> Preview | None:
        """What is known at once, without reading the images; None if that is nothing.

        Raises HpmlError for data that prepare would surely refuse.
        """
        return None

    @abstractmethod
    def load(self, out: Output) -> Loaded:
        """Read the images; `out.scratch` may hold what is expensive to fetch or to extract.

        Raises StageFailed if they cannot be read, naming the files or rows.
        """
