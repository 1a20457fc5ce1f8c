"""WebDataset shards: .tar files of pictures with their labels beside them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.shards import expanded
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource


class WebDataset(ImageSource):
    """Shards with the split in their names: `train-000000.tar`, `val/000000.tar`; or all for training.

    A sample is `KEY.jpg` (or jpeg, png) with `KEY.cls`, a number or a name, or `KEY.json` with a field
    `label`; what else it has is left alone. Pictures become pixels as those of `folder` do.
    """

    shrinks: ClassVar[bool] = True

    source: Literal["webdataset"] = "webdataset"
    path: UserPath  # a folder, a shard, or a pattern: train-{000..146}.tar; each also at s3://BUCKET/KEY
    label_field: str = Field(default="", max_length=200)  # the kind of file (cls), or the field of .json
    class_names: tuple[str, ...] = ()  # in the order of their numbers; none: the labels themselves
    channels: Literal[1, 3] | None = None  # grey or colour; None: grey if every image is
    licence: str = "not stated"  # of the images, for the record

    def unsupported_reason(self) -> str:
        """Whether `path`, or a shard of the pattern, is missing."""
        return next(filter(None, map(user_files.unsupported_reason, self._paths())), "")

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the shards."""
        digests = [user_files.fingerprint(path) for path in self._paths()]
        if len(digests) == 1 or not all(digests):
            return digests[0] if all(digests) else ""
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def preview_pictures(self) -> PicturesPreview | None:
        """What the first samples say; None in S3, or where `class_names` does not tell the classes.

        Raises StageFailed for shards that prepare would refuse.
        """
        if isinstance(self.path, str) or self.unsupported_reason():
            return None
        try:
            from hpml.tasks.image_classification.data.picture_shards import PictureShards, preview_shards
        except ModuleNotFoundError:
            return None
        folder, names = _shards([path for path in self._paths() if isinstance(path, Path)])
        shards = PictureShards(folder, names, label=self.label_field)
        return preview_shards(shards, self.class_names, channels=self.channels)

    def load(self, out: Output) -> Loaded:
        """The images of each split in the order of shards and samples.

        Raises StageFailed naming the shard or sample that is damaged, or lacks its picture or label.
        """
        from hpml.tasks.image_classification.data.picture_shards import PictureShards, read_shards

        folder, names = _shards(user_files.all_here(self._paths(), out))
        images, class_names, pictures = read_shards(
            PictureShards(folder, names, label=self.label_field),
            self.class_names,
            image_size=self.image_size,
            channels=self.channels,
            out=out,
        )
        return Loaded(images, class_names, self.licence, pictures)

    def _paths(self) -> list[UserPath]:
        """The path, or those that its pattern stands for."""
        if isinstance(self.path, str):
            return list(expanded(self.path))
        return [self.path] if self.path.exists() else [Path(name) for name in expanded(str(self.path))]


def _shards(paths: list[Path]) -> tuple[Path, list[str]]:
    """The folder that holds all shards, and their names below it."""
    if len(paths) == 1 and paths[0].is_dir():
        return paths[0], [file.relative_to(paths[0]).as_posix() for file in sorted(paths[0].rglob("*.tar"))]
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return folder, [path.relative_to(folder).as_posix() for path in paths]
