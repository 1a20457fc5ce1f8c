"""Digits: 1797 real handwritten digits, 8x8, from inside the package `scikit-learn`."""

from __future__ import annotations

from typing import Literal

from hpml.data_files.packaged import PackagedFile
from hpml.tasks.image_classification.sources.packaged import PackagedDigits


class Digits(PackagedDigits):
    """The test set of UCI's Optical Recognition of Handwritten Digits (Alpaydin, Kaynak 1998).

    Its 17 levels of grey are spread over 0 to 255.
    """

    FILE = PackagedFile(package="sklearn", distribution="scikit-learn", name="datasets/data/digits.csv.gz")
    LICENCE, SIDE, ROWS, BRIGHTEST = "CC-BY-4.0", 8, 1797, 16

    source: Literal["digits"] = "digits"
