"""What can be set about the augmentation of pictures."""

from __future__ import annotations

from pydantic import Field

from hpml.core.contract import Config


class Augment(Config):
    """Random changes to each training image, drawn anew every epoch; all off = the images as they are.

    Lengths are shares of the image's side, so that one setting suits 8x8 and 32x32 images.
    """

    shift: float = Field(default=0.125, ge=0, le=0.5)  # up to this far in each direction, whole pixels
    rotation_degrees: float = Field(default=10.0, ge=0, le=180)  # up to this far either way
    scale: float = Field(default=0.1, ge=0, lt=1)  # larger or smaller by up to this share
    flip: bool = False  # mirror half of the images left to right; wrong for digits and letters
    cutout: float = Field(default=0.0, ge=0, lt=1)  # side of a square that is blanked, at a random place
