"""What every source of pictures is: a config that loads labelled images as arrays."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpml.core.contract import Output, Result
from hpml.tasks.data_source import Preview, Source
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.task import ImageClassification

if TYPE_CHECKING:
    from hpml.artifacts.dataset import DatasetSpec


class ImageSource(Source):
    """Base of the sources of pictures. A subclass adds `source`, its options, and `load`."""

    task_class = ImageClassification
    shrinks: ClassVar[bool] = False  # whether images that are larger than image_size become smaller

    image_size: int | None = Field(default=None, ge=4, le=1024)  # pad to this square; None: as they are
    # What to do about an image that is in both splits, or under two labels. "drop" leaves the first out of
    # the train split and the second out altogether, and says so in the dataset's notes.
    duplicates: Literal["refuse", "drop"] = "refuse"

    def preview_pictures(self) -> PicturesPreview | None:
        """What is known at once, without reading the images; None if that is nothing.

        Raises HpmlError for data that prepare would surely refuse.
        """
        return None

    def preview(self) -> Preview:
        """The shape of the images once prepared, their classes, and what prepare would refuse them for."""
        known = self.preview_pictures()
        if known is None:
            return Preview()
        shape_chw = known.shape_chw(self.image_size)
        bytes_prepared = known.images * math.prod(shape_chw or (0,))
        return Preview(
            task=_task(known.class_count, shape_chw) if shape_chw else None,
            rows=known.images,
            bytes_prepared=bytes_prepared,
            problems=tuple(self._problems(known)),
            remarks=known.remarks(),
            is_guess=known.channels == 1
            and known.looked_at < known.images,  # of the rest one may be in colour
        )

    def stand_in(self) -> ImageClassification:
        """Colour pictures of ten classes."""
        return _task(10, (3, 32, 32))

    def _problems(self, known: PicturesPreview) -> Iterator[str]:
        if known.class_count < 2:
            yield f"the data has {known.class_count} class, two are needed"
        size, side = self.image_size, max(known.largest_hw)
        if size is None and known.smallest_hw != known.largest_hw:
            yield "its images are of different sizes: set data.image_size"
        if size is not None and size < side and not self.shrinks:
            yield f"image_size {size} is smaller than the images, whose side is {side}"

    @abstractmethod
    def load(self, out: Output) -> Loaded:
        """Read the images; `out.scratch` may hold what is expensive to fetch or to extract.

        Raises StageFailed if they cannot be read, naming the files or rows.
        """

    def prepare(self, out: Output) -> Result[DatasetSpec]:
        """Write `<split>_images.npy`, uint8 NHWC, and `<split>_labels.npy`, int64.

        Raises StageFailed that lists the offending rows if the data breaks the contract (see `data/checks`),
        and ConfigInvalid if `image_size` is smaller than the images.
        """
        from hpml.tasks.image_classification.data.prepare import prepare

        loaded = self.load(out)
        self.note_unused(loaded.splits, out)
        return prepare(
            loaded,
            out,
            source=self.source,
            image_size=self.image_size,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
            duplicates=self.duplicates,
        )


def _task(classes: int, shape_chw: tuple[int, int, int]) -> ImageClassification:
    channels, height, width = shape_chw
    return ImageClassification(
        class_names=tuple(map(str, range(classes))),
        image_shape_hwc=(height, width, channels),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
    )
