"""The data sources. A source is one file here and one row of SOURCES."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator

from hpml.components.prepare.sources.base import Images, Loaded, Preview, Source
from hpml.components.prepare.sources.cifar10 import Cifar10
from hpml.components.prepare.sources.digits import Digits
from hpml.components.prepare.sources.folder import Folder
from hpml.components.prepare.sources.mnist5k import Mnist5k
from hpml.components.prepare.sources.npz import Npz
from hpml.core.contract import BareName

SOURCES: dict[str, type[Source]] = {
    "mnist5k": Mnist5k,
    "digits": Digits,
    "cifar10": Cifar10,
    "folder": Folder,
    "npz": Npz,
}

if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = Annotated[
        Union[tuple(SOURCES.values())],  # noqa: UP007
        Discriminator("source"),
        BareName("source"),
    ]

__all__ = ["SOURCES", "AnySource", "Images", "Loaded", "Preview", "Source"]
