"""IDX files, as MNIST, Fashion-MNIST, EMNIST and KMNIST are published."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource


class Idx(ImageSource):
    """A folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the like of `t10k` or `test`.

    Files may be gzipped. What is not is read where it is: it may be larger than memory. A fourth size is the
    channels, last (idx4). Which split a file is of is in its name; where none says it, all are for training.
    """

    source: Literal["idx"] = "idx"
    path: UserPath  # the folder, or a .tar, .tar.gz or .zip of it; also at s3://BUCKET/KEY
    class_names: tuple[str, ...] = ()  # in the order of their numbers; none: the numbers
    licence: str = "not stated"  # of the images, for the record

    def unsupported_reason(self) -> str:
        """Whether `path` is missing."""
        return user_files.unsupported_reason(self.path)

    def fingerprint(self) -> str:
        """A digest of the names, sizes and modification times of the files."""
        return user_files.fingerprint(self.path)

    def preview_pictures(self) -> PicturesPreview | None:
        """What the headers and labels say; None for an archive, or where numpy is absent.

        Raises StageFailed for files that prepare would refuse.
        """
        if isinstance(self.path, str) or not self.path.is_dir():
            return None
        try:
            from hpml.tasks.image_classification.data.idx_images import preview_idx_folder
        except ModuleNotFoundError:
            return None
        return preview_idx_folder(self.path, classes=len(self.class_names))

    def load(self, out: Output) -> Loaded:
        """The images of each split in the order of their file.

        Raises StageFailed naming the file that is damaged, or what is missing beside it.
        """
        from hpml.tasks.image_classification.data.class_labels import ClassLabels
        from hpml.tasks.image_classification.data.idx_images import read_idx_folder

        class_labels = ClassLabels(self.class_names)
        images = read_idx_folder(user_files.open_folder(self.path, out), class_labels, out.scratch)
        return Loaded(images, class_labels.class_names, self.licence)
