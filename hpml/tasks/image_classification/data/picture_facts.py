"""What prepare notes of how a picture's file becomes pixels, for whoever serves the model."""

from __future__ import annotations

from typing import Any, Literal

from hpml.tasks.image_classification import pictures
from hpml.tasks.image_classification.picture_spec import PictureSpec

FORMATS = ("PNG", "JPEG")
MOST_PIXELS = 50_000_000  # of one picture; a file of a few kilobytes can claim billions
MODES: dict[int, Literal["L", "RGB"]] = {1: "L", 3: "RGB"}
POLICY: dict[str, Any] = {
    "formats": FORMATS,
    "max_pixels": MOST_PIXELS,
    "exif_transpose": True,
    "background": 0,
    "resampling": "lanczos",
    "reducing_gap": 2.0,
}


def facts_of(
    data_from: Literal["pictures", "arrays"],
    channels: int,
    *,
    resize: Literal["shrink", "none"],
    fit_within_hw: tuple[int, int],
    size_hw: tuple[int, int],
) -> PictureSpec:
    """Our policy for pictures, with what this dataset adds, and the digests of the golden pictures."""
    facts = POLICY | {
        "data_from": data_from,
        "mode": MODES[channels],
        "resize": resize,
        "fit_within_hw": fit_within_hw,
        "size_hw": size_hw,
        "pillow": pictures.PILLOW_VERSION,
    }
    golden = tuple(
        (file.name, pictures.pixels_sha256(pictures.read_golden(file, facts)))
        for file in pictures.golden_files()
    )
    return PictureSpec.model_validate(facts | {"golden_sha256": golden})


def for_arrays(shape_hwc: tuple[int, int, int], padded_hwc: tuple[int, int, int]) -> PictureSpec:
    """How to read a picture for a network whose training images came as arrays and were padded only.

    No such picture was seen in training: it is shrunk to where the arrays' pixels were, by the same policy.
    """
    height, width, channels = shape_hwc
    return facts_of(
        "arrays", channels, resize="shrink", fit_within_hw=(height, width), size_hw=padded_hwc[:2]
    )
