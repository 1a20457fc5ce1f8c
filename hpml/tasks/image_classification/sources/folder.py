"""A folder of images, one folder per class."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource


class Folder(ImageSource):
    """PNG and JPEG files in one folder per class; under `train`, `validation` and `test` or without these.

    With `image_size`, larger images shrink to fit, their proportions kept, and all are padded with black
    around; without it, all have to be of one size. What is meant to be no image is left out, and named.
    """

    shrinks: ClassVar[bool] = True

    source: Literal["folder"] = "folder"
    path: UserPath  # the folder, or a .tar, .tar.gz or .zip of it; also at s3://BUCKET/KEY
    channels: Literal[1, 3] | None = None  # grey or colour; None: grey if every image is
    licence: str = "not stated"  # of the images, for the record

    def unsupported_reason(self) -> str:
        """Whether `path` is missing."""
        return user_files.unsupported_reason(self.path)

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the files."""
        return user_files.fingerprint(self.path)

    def preview_pictures(self) -> PicturesPreview | None:
        """What the names and the headers of the images say; None for an archive, or where Pillow is absent.

        Raises StageFailed for a folder that prepare would refuse.
        """
        if isinstance(self.path, str) or not self.path.is_dir():
            return None
        try:
            from hpml.tasks.image_classification.data.image_files import preview_image_folder
        except ModuleNotFoundError:
            return None
        return preview_image_folder(self.path, channels=self.channels)

    def load(self, out: Output) -> Loaded:
        """The images in the order of their names.

        Raises StageFailed naming the images that are damaged or out of place, or if the archive is hostile.
        """
        from hpml.tasks.image_classification.data.image_files import read_image_folder

        root = user_files.open_folder(self.path, out)
        images, folder, pictures = read_image_folder(
            root, image_size=self.image_size, channels=self.channels, out=out
        )
        return Loaded(images, folder.class_names, self.licence, pictures, folder.left_out)
