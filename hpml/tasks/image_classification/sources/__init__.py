"""The sources of labelled pictures. A source is one file here and one row of SOURCES."""

from __future__ import annotations

from hpml.tasks.image_classification.sources.base import ImageSource
from hpml.tasks.image_classification.sources.cifar10 import Cifar10
from hpml.tasks.image_classification.sources.digits import Digits
from hpml.tasks.image_classification.sources.folder import Folder
from hpml.tasks.image_classification.sources.idx import Idx
from hpml.tasks.image_classification.sources.mnist5k import Mnist5k
from hpml.tasks.image_classification.sources.npz import Npz
from hpml.tasks.image_classification.sources.parquet import Parquet
from hpml.tasks.image_classification.sources.webdataset import WebDataset

SOURCES: dict[str, type[ImageSource]] = {
    "mnist5k": Mnist5k,
    "digits": Digits,
    "cifar10": Cifar10,
    "folder": Folder,
    "npz": Npz,
    "idx": Idx,
    "parquet": Parquet,
    "webdataset": WebDataset,
}

__all__ = ["SOURCES", "ImageSource"]
