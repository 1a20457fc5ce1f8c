"""What a source of pictures delivers, and what is known of it before it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpml.tasks.image_classification.picture_spec import PictureSpec


@dataclass(frozen=True)
class RowNames(Sequence[str]):
    """The names of rows that have none but their number: "x_train row 0"; made as they are asked for."""

    of: str
    rows: int
    first: int = 0

    def __len__(self) -> int:
        return self.rows

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[one] for one in range(self.rows)[row]]
        return f"{self.of} {self.first + range(self.rows)[row]}"


@dataclass(frozen=True)
class Images:
    """Labelled images: uint8 (rows, height, width, channels), in memory or memory-mapped, and int64 (rows,).

    names: what the owner of the images calls each row, such as a file name; for messages.
    """

    images_nhwc: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: Sequence[str]

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        """Of the pixels of each image 128 bits, (rows, 2): equal images have equal ones."""
        import hashlib

        import numpy as np

        from hpml.core.mapped_rows import parts

        digests = np.empty((len(self.labels), 2), np.uint64)
        for part in parts(self.images_nhwc):
            rows = np.ascontiguousarray(self.images_nhwc[part])
            rows = rows.reshape(len(rows), -1)
            joined = b"".join(hashlib.blake2b(row.data, digest_size=16).digest() for row in rows)
            digests[part] = np.frombuffer(joined, np.uint64).reshape(-1, 2)
        return digests


@dataclass(frozen=True)
class Loaded:
    """What a source delivers: the splits of its own by name, `train` at least. Prepare makes those it lacks.

    pictures: how files became these images; None where the source has arrays.
    left_out: the names of what the source holds beside its images.
    """

    splits: Mapping[str, Images]
    class_names: tuple[str, ...]
    licence: str
    pictures: PictureSpec | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class PicturesPreview:
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

    def remarks(self) -> tuple[str, ...]:
        """What a user should know beforehand."""
        from hpml.core.words import counted

        if not self.left_out:
            return ()
        return (f"prepare will leave out, as no images: {counted(self.left_out, 'file')}",)
