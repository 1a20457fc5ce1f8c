"""What sources have in common whose images an installed package ships as a table of pixels and labels."""

from __future__ import annotations

from typing import ClassVar

from hpml.core.contract import Output
from hpml.data_files.packaged import PackagedFile
from hpml.tasks.image_classification.data.loaded import Images, Loaded, PicturesPreview, RowNames
from hpml.tasks.image_classification.sources.base import ImageSource


class PackagedDigits(ImageSource):
    """Grey squares of ten classes. A subclass says which FILE, its licence, and how large and how many."""

    FILE: ClassVar[PackagedFile]
    LICENCE: ClassVar[str]
    SIDE: ClassVar[int]
    ROWS: ClassVar[int]
    BRIGHTEST: ClassVar[int] = 255  # what the table has for white

    def unsupported_reason(self) -> str:
        """What is missing if the package is not installed."""
        return self.FILE.unsupported_reason()

    def fingerprint(self) -> str:
        """The version of the package that ships the images."""
        return self.FILE.version()

    def preview_pictures(self) -> PicturesPreview:
        """Always the same."""
        size_hw = (self.SIDE, self.SIDE)
        return PicturesPreview(10, 1, size_hw, size_hw, images=self.ROWS, looked_at=self.ROWS)

    def load(self, out: Output) -> Loaded:
        """All images, uint8 with one channel, in the file's order."""
        table = self.FILE.read_table(columns=self.SIDE**2 + 1)
        grey = (table[:, :-1] * (255 / self.BRIGHTEST)).round().clip(0, 255).astype("uint8")
        name = self.FILE.name.rpartition("/")[2].removesuffix(".gz")
        images = Images(
            images_nhwc=grey.reshape(-1, self.SIDE, self.SIDE, 1),
            labels=table[:, -1].astype("int64"),
            names=RowNames(f"{name} line", len(table), first=1),
        )
        return Loaded({"train": images}, class_names=tuple("0123456789"), licence=self.LICENCE)
