"""Digits: 1797 real handwritten digits, 8x8, from inside the package `scikit-learn`."""

from __future__ import annotations

from typing import Literal

from hpml.components.prepare.packaged import PackagedFile
from hpml.components.prepare.sources.base import Images, Loaded, Preview, Source
from hpml.core.contract import Output

FILE = PackagedFile(package="sklearn", distribution="scikit-learn", name="datasets/data/digits.csv.gz")
SIDE = 8
ROWS = 1797
BRIGHTEST = 16


class Digits(Source):
    """The test set of UCI's Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998)."""

    source: Literal["digits"] = "digits"

    def unsupported_reason(self) -> str:
        """What is missing if scikit-learn is not installed."""
        return FILE.unsupported_reason()

    def fingerprint(self) -> str:
        """The version of the package that ships the images."""
        return FILE.version()

    def preview(self) -> Preview:
        """Always the same."""
        return Preview(10, 1, (SIDE, SIDE), (SIDE, SIDE), images=ROWS, looked_at=ROWS)

    def load(self, out: Output) -> Loaded:
        """The 1797 images, 8x8x1, their 17 levels of grey spread over 0 to 255."""
        table = FILE.read_table(columns=SIDE * SIDE + 1)
        grey = (table[:, :-1] * (255 / BRIGHTEST)).round().clip(0, 255).astype("uint8")
        images = Images(
            images_nhwc=grey.reshape(-1, SIDE, SIDE, 1),
            labels=table[:, -1].astype("int64"),
            names=[f"digits.csv line {line}" for line in range(1, len(table) + 1)],
        )
        return Loaded(images, test=None, class_names=tuple("0123456789"), licence="CC-BY-4.0")
