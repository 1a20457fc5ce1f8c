"""From a picture's file to the pixels that a network is trained on. Needs Pillow and numpy, nothing else.

`prepare` reads pictures with this module, and every bundle holds a copy of it, so that a served picture is
treated as a training picture was, bit for bit. `facts` is what `prepare` noted of it: a PictureSpec
(hpml/artifacts/folder.py) as a mapping, which a bundle has in preprocessing.json under "pictures".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import PIL
from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PILLOW_VERSION = PIL.__version__
GREY_MODES = {"1", "L", "LA"}
COLOUR_MODES = {"P", "RGB", "RGBA", "CMYK"}

File = Path | IO[bytes]


class PictureError(ValueError):
    """Why a file cannot be read as a picture, in one line."""


def read(file: File, facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The pixels of a picture, uint8 (height, width, channels).

    Raises PictureError if the file is not a picture, is damaged, too large, or of a size that is not allowed.
    """
    try:
        is_grey(file, formats=facts["formats"], max_pixels=facts["max_pixels"])
        return fit(decode(file, facts), facts)
    except Exception as error:  # a decoder meets whatever a hostile file makes it meet
        raise PictureError(reason(error)) from None


def is_grey(file: File, *, formats: Collection[str], max_pixels: int) -> bool:
    """Whether a picture is grey. Checks what can be checked without decoding it: format, size, chunk sums."""
    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise PictureError("not a regular file")
    with Image.open(file, formats=tuple(formats)) as image:
        require_usable(image, max_pixels=max_pixels)
        image.verify()
        return image.mode in GREY_MODES


def require_usable(image: Image.Image, *, max_pixels: int) -> None:
    """Raise PictureError if the header of a picture says that it is too large, or of another kind."""
    width, height = image.size
    if width * height > max_pixels:
        raise PictureError(f"{width}x{height} are more than {max_pixels} pixels")
    if image.mode not in GREY_MODES | COLOUR_MODES:
        raise PictureError(f"mode {image.mode}, 8 bits per channel are read")


def decode(file: File, facts: Mapping[str, Any]) -> Image.Image:
    """The picture upright, what is transparent on the background, grey or in colour; of its own size."""
    background = facts["background"]
    with Image.open(file, formats=tuple(facts["formats"])) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened) if facts["exif_transpose"] else opened.copy()
    if image.has_transparency_data:
        image = image.convert("RGBA")
        below = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(below, image)
    return image.convert(facts["mode"])


def fit(image: Image.Image, facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The pixels of `image` in the middle of the background, shrunk in proportion if it is larger.

    Raises PictureError if it has another size than all training pictures had, where they were not resized.
    """
    height, width = facts["size_hw"]
    if facts["resize"] == "none" and image.size != (width, height):
        raise PictureError(
            f"{image.width}x{image.height} pixels;"
            f" the training pictures were all {width}x{height}, and none was resized"
        )
    within_height, within_width = facts["fit_within_hw"]
    image.thumbnail(
        (within_width, within_height),
        Image.Resampling[facts["resampling"].upper()],
        reducing_gap=facts["reducing_gap"],
    )
    canvas = Image.new(image.mode, (width, height), (facts["background"],) * len(image.mode))
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return np.asarray(canvas).reshape(height, width, len(image.mode))


def reason(error: Exception) -> str:
    """Why a picture cannot be used, in one line of moderate length."""
    if isinstance(error, UnidentifiedImageError):
        return "not a PNG or JPEG"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:100] or type(error).__name__


def golden_files() -> list[Path]:
    """The golden pictures beside this module: one for each way that a picture's file can be special."""
    return sorted((Path(__file__).parent / "golden_pictures").iterdir())


def read_golden(file: File, facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The pixels of a golden picture, which fits any network: it is resized even where others are refused."""
    return read(file, {**facts, "resize": "shrink", "fit_within_hw": facts["size_hw"]})


def pixels_sha256(pixels_hwc: NDArray[np.uint8]) -> str:
    """What `golden_sha256` holds of each golden picture."""
    return hashlib.sha256(pixels_hwc.tobytes()).hexdigest()
