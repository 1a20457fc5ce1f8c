"""CIFAR-10: 60000 colour photographs, 32x32, in ten classes, from its published archives."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.image_classification.data.loaded import Loaded, PicturesPreview
from hpml.tasks.image_classification.sources.base import ImageSource

ROWS = 60_000
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Cifar10(ImageSource):
    """CIFAR-10 (Krizhevsky 2009), with its own split of 50000 and 10000.

    The archives are at https://www.cs.toronto.edu/~kriz/, with these SHA-256:
    cifar-10-python.tar.gz 6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce
    cifar-10-binary.tar.gz c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
    """

    source: Literal["cifar10"] = "cifar10"
    path: UserPath | None = None  # an archive, or the folder extracted from it; also at s3://BUCKET/KEY
    url: str | None = None  # or where to fetch the archive, https only, with its `sha256`
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")  # of the archive; checked if given

    @model_validator(mode="after")
    def _check_origin(self) -> Cifar10:
        if (self.path is None) == (self.url is None):
            raise ValueError("give either `path`, the archive or folder you have, or `url` with `sha256`")
        if self.url is not None:
            address = urlsplit(self.url)
            if address.scheme != "https" or not address.hostname or "@" in address.netloc:
                raise ValueError("`url` has to be an https address without user name and password")
            if self.sha256 is None:
                raise ValueError("`url` needs the `sha256` of what it delivers")
        return self

    def unsupported_reason(self) -> str:
        """What is wrong with `path` on this machine."""
        if self.sha256 and isinstance(self.path, Path) and self.path.is_dir():
            return f"`sha256` is that of an archive, and {self.path} is a folder: leave it out"
        return user_files.unsupported_reason(self.path) if self.path else ""

    def fingerprint(self) -> str:
        """The checksum of the archive, or a digest of the names, sizes and times of the files at `path`."""
        if self.sha256 or self.path is None:
            return self.sha256 or ""
        return user_files.fingerprint(self.path)

    def preview_pictures(self) -> PicturesPreview:
        """Always the same."""
        return PicturesPreview(len(CLASS_NAMES), 3, (32, 32), (32, 32), images=ROWS, looked_at=ROWS)

    def load(self, out: Output) -> Loaded:
        """Both splits, 32x32x3, in the published order.

        Raises StageFailed if the archive has another checksum, is hostile or damaged.
        """
        from hpml.tasks.image_classification.data.cifar_batches import find_batches, read_batches

        *train, test = find_batches(user_files.open_folder(self._archive(out), out))
        return Loaded(
            {"train": read_batches(train), "test": read_batches([test])},
            class_names=CLASS_NAMES,
            licence="none stated; asks to cite Krizhevsky, Learning Multiple Layers of Features, 2009",
        )

    def _archive(self, out: Output) -> Path:
        """The archive (or folder) on this machine, its checksum verified."""
        if self.path is None:
            from hpml.data_files.download import download

            assert self.url and self.sha256
            fetched = out.scratch / f"{self.sha256}.tar.gz"
            download(self.url, sha256=self.sha256, to=fetched, out=out)
            return fetched
        archive = user_files.here(self.path, out)
        if self.sha256:
            fix = "fetch it again, or correct `sha256`"
            user_files.require_sha256(archive, self.sha256, given=self.path, fix=fix)
        return archive
