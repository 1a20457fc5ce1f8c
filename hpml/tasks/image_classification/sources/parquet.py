"""Tables of pictures in Parquet, Arrow or Feather files, as on the Hugging Face hub."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource


class Parquet(ImageSource):
    """A file, or a folder of shards with the split in their names: `data/train-00000-of-00012.parquet`.

    Images are files of PNG or JPEG, as bytes or in structs {bytes, path}, or lists of pixels; they become
    pixels as those of `folder` do. Labels are numbers or names. What `datasets` saved (.arrow), Arrow and
    Feather files are read as well. Where no name says a split, all are for training.
    """

    shrinks: ClassVar[bool] = True

    source: Literal["parquet"] = "parquet"
    path: UserPath  # the file or folder, or a .tar, .tar.gz or .zip of it; also at s3://BUCKET/KEY
    image_column: str = Field(default="", max_length=200)  # "": what is noted as one, or named image
    label_column: str = Field(default="", max_length=200)  # likewise
    class_names: tuple[str, ...] = ()  # in the order of their numbers; none: what is noted, or the labels
    channels: Literal[1, 3] | None = None  # grey or colour; None: grey if every image is
    licence: str = "not stated"  # of the images, for the record

    def unsupported_reason(self) -> str:
        """Whether `path` is missing, or what reads it."""
        return user_files.unsupported_reason(self.path) or user_files.missing_package("pyarrow", "parquet")

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the files."""
        return user_files.fingerprint(self.path)

    def preview_pictures(self) -> PicturesPreview | None:
        """What schema and first rows say; None for an archive, or where that does not tell the classes.

        Raises StageFailed for files that prepare would refuse, ConfigInvalid if columns are not known.
        """
        if isinstance(self.path, str) or self.unsupported_reason() or self._is_archive(self.path.suffix):
            return None
        try:
            from hpml.tasks.image_classification.data.picture_tables import PictureTables, preview_tables
        except ModuleNotFoundError:
            return None
        tables = PictureTables(
            self.path, image=self.image_column, label=self.label_column, class_names=self.class_names
        )
        return preview_tables(tables, channels=self.channels)

    def load(self, out: Output) -> Loaded:
        """The images of each split in the order of their files' names.

        Raises StageFailed naming the rows that hold no picture, ConfigInvalid if columns are not known.
        """
        from hpml.tasks.image_classification.data.picture_tables import PictureTables, read_tables

        path = user_files.here(self.path, out)
        root = user_files.open_folder(path, out) if self._is_archive(path.suffix) else path
        tables = PictureTables(
            root, image=self.image_column, label=self.label_column, class_names=self.class_names
        )
        images, class_names, pictures = read_tables(
            tables, image_size=self.image_size, channels=self.channels, out=out
        )
        return Loaded(images, class_names, self.licence, pictures)

    @staticmethod
    def _is_archive(suffix: str) -> bool:
        return suffix in (".tar", ".gz", ".tgz", ".zip")
