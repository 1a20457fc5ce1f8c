"""What every data source is: a config that loads labelled images as arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from components.contract import Config, Output

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Images:
    """Labelled images: uint8 (rows, height, width, channels) and int64 (rows,)."""

    images_nhwc: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Loaded:
    """What a source delivers. `test` is None where the source has no split of its own: prepare makes one.

    rows_are_named: maps a row to something its owner can find, such as a file name; empty where rows suffice.
    """

    train: Images
    test: Images | None
    class_names: tuple[str, ...]
    licence: str
    row_names: tuple[str, ...] = ()


class Source(Config, ABC):
    """Base of the sources. A subclass adds `source: Literal["its-name"]`, its options, and `load`."""

    source: str
    image_size: int | None = Field(
        default=None, ge=4, le=1024
    )  # pad (smaller) to this square; None: as it is
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # where the source has no test split of its own
    seed: int = 0

    @abstractmethod
    def load(self, out: Output) -> Loaded:
        """Read the images; `out.scratch` may hold what is expensive to fetch or to extract."""
