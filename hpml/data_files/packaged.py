"""Data files that an installed Python package ships, read without running the package's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml.core.errors import StageFailed

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a package.

    package: what is imported. name: the file's path in it. distribution: what is installed, if it differs.
    """

    package: str
    name: str
    distribution: str = ""

    def unsupported_reason(self) -> str:
        """Why the file cannot be read on this machine; empty if it can."""
        installed = self.distribution or self.package
        file = self._file()
        if file is None:
            return f"{installed}, which ships the data, is not installed: pip install 'hpml-pipeline[data]'"
        if not file.is_file():
            return f"{installed} {self.version()} does not ship {self.name}: install another version of it"
        return ""

    def version(self) -> str:
        """The version of what is installed; empty if it is not."""
        from importlib import metadata

        try:
            return metadata.version(self.distribution or self.package)
        except metadata.PackageNotFoundError:
            return ""

    def read_bytes(self) -> bytes:
        """The whole file. Raises StageFailed if it cannot be read."""
        file, installed = self._file(), self.distribution or self.package
        try:
            if file is None:
                raise FileNotFoundError(f"{installed} is not installed")
            return file.read_bytes()
        except OSError as error:
            raise StageFailed(
                f"cannot read {self.name} of {installed}",
                why=str(error),
                fix=f"pip install --force-reinstall {installed}",
            ) from None

    def read_table(self, *, columns: int) -> NDArray[np.uint8]:
        """The gzipped CSV of integers 0 to 255 as an array (lines, columns).

        Raises StageFailed if the file is damaged.
        """
        import gzip
        import io
        import zlib

        import numpy as np

        compressed = self.read_bytes()
        try:
            text = gzip.decompress(compressed)
            table = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.uint8, ndmin=2)
            if table.shape[1] != columns:
                raise ValueError(f"{table.shape[1]} columns instead of {columns}")
        except (OSError, EOFError, zlib.error, ValueError) as error:
            name = self.distribution or self.package
            raise StageFailed(
                f"cannot read {self.name} of {name}",
                why=str(error),
                fix=f"pip install --force-reinstall {name}",
            ) from None
        return table

    def _file(self) -> Traversable | None:
        import importlib.resources
        import importlib.util

        spec = importlib.util.find_spec(self.package)
        if spec is None:
            return None
        # A module made from its spec but never executed: importing it would run the package's code.
        unexecuted = importlib.util.module_from_spec(spec)
        return importlib.resources.files(unexecuted).joinpath(self.name)
