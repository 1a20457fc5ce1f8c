"""A folder of images, one folder per class."""

from __future__ import annotations

from typing import Literal

from components.contract import Output
from components.prepare import user_files
from components.prepare.sources.base import Loaded, Source
from components.prepare.user_files import UserPath


class Folder(Source):
    """PNG and JPEG files in one folder per class; with folders `train` and `test` around those, or without.

    With `image_size`, larger images shrink to fit, their proportions kept, and all are padded with black
    around; without it, all have to be of one size. What has a name that begins with a dot is ignored.
    """

    source: Literal["folder"] = "folder"
    path: UserPath  # the folder, or a .tar, .tar.gz or .zip of it; also at s3://BUCKET/KEY
    channels: Literal[1, 3] | None = None  # grey or colour; None: grey if every image is
    licence: str = "not stated"  # of the images, for the record

    def unmet(self) -> str:
        """Whether `path` is missing."""
        return user_files.unmet(self.path)

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the files."""
        return user_files.fingerprint(self.path)

    def load(self, out: Output) -> Loaded:
        """The images in the order of their names.

        Raises StageFailed naming the files that are no images or are damaged, or if the archive is hostile.
        """
        from components.prepare.image_files import read_image_folder

        root = user_files.open_folder(self.path, out)
        train, test, class_names = read_image_folder(
            root, image_size=self.image_size, channels=self.channels, out=out
        )
        return Loaded(train, test, class_names, self.licence)
