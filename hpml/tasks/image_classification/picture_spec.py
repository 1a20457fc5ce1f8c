"""How a picture becomes pixels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpml.core.contract import Config


class PictureSpec(Config):
    """How a picture's file becomes uint8 HWC pixels: noted by `prepare`, done by `pictures.py`.

    Where the data came as arrays, no picture was read, and this is a convention for whoever serves the model.
    Colour profiles are ignored. Grey (mode L) is (299 R + 587 G + 114 B) / 1000.
    """

    data_from: Literal["pictures", "arrays"]
    formats: tuple[str, ...]
    max_pixels: int  # larger pictures are refused undecoded
    exif_transpose: bool
    background: int = Field(ge=0, le=255)  # level of grey below what is transparent, and around
    mode: Literal["L", "RGB"]
    resize: Literal["shrink", "none"]  # in proportion and never enlarged; none: other sizes are refused
    resampling: Literal["lanczos"]
    reducing_gap: float  # of Pillow's `thumbnail`
    fit_within_hw: tuple[int, int]
    size_hw: tuple[int, int]  # with the background around
    pillow: str  # its version; another may decode or resample otherwise
    golden_sha256: tuple[tuple[str, str], ...]  # of the pixels that each of golden_pictures became
