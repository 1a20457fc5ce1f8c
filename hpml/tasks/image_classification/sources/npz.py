"""Arrays in a numpy `.npz` file: the images of anyone who can call `numpy.savez`."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource


class Npz(ImageSource):
    """`x_train`, `y_train`, and so for validation and test, or `x`, `y`; and if you like `class_names`.

    x: (rows, height, width) or (rows, height, width, 1 or 3), integers 0 to 255 or floats 0 to 1.
    y: (rows,), integers from 0. class_names: (classes,), strings.
    """

    source: Literal["npz"] = "npz"
    path: UserPath  # the .npz file; also at s3://BUCKET/KEY
    licence: str = "not stated"  # of the images, for the record

    def unsupported_reason(self) -> str:
        """Whether `path` is missing."""
        return user_files.unsupported_reason(self.path, or_folder=False)

    def fingerprint(self) -> str:
        """A digest of the file's size and modification time."""
        return user_files.fingerprint(self.path)

    def preview_pictures(self) -> PicturesPreview | None:
        """What the headers of the arrays say; None where numpy is absent.

        Raises StageFailed for a file that prepare would refuse.
        """
        if isinstance(self.path, str) or self.unsupported_reason():
            return None
        try:
            from hpml.tasks.image_classification.data.npz_arrays import preview_npz
        except ModuleNotFoundError:
            return None
        return preview_npz(self.path)

    def load(self, out: Output) -> Loaded:
        """The arrays of the file, mapped from what was unpacked of it: they may be larger than memory.

        Raises StageFailed if an array is missing, unknown, of a wrong type or shape, or holds NaN or values
        out of range, listing the rows.
        """
        from hpml.tasks.image_classification.data.npz_arrays import read_npz

        splits, class_names = read_npz(user_files.here(self.path, out), out.scratch)
        return Loaded(splits, class_names, self.licence)
