"""Draws the golden pictures of hpml/tasks/image_classification: one for each way that a file can be special.

    python -m tests.draw_golden_pictures FOLDER

Drawn once and kept: encoders differ between versions of Pillow, and the digests in old datasets are of these.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

ORIENTATION = 0x0112  # the EXIF tag


def chart(width: int, height: int, channels: int) -> np.ndarray:
    """Waves of a few pixels and slow ramps: whatever resamples, turns or mirrors them leaves its mark."""
    y, x = np.mgrid[:height, :width]
    waves = [
        127 + 120 * np.sin(x / (5 + channel) + y / (9 - channel)) * (x + 2 * y) / (width + 2 * height)
        for channel in range(channels)
    ]
    return np.stack(waves, axis=-1).round().astype(np.uint8)


def draw(folder: Path) -> None:
    """Write every picture into `folder`."""

    def exif(orientation: int) -> Image.Exif:
        tags = Image.Exif()
        tags[ORIENTATION] = orientation
        return tags

    rgb = Image.fromarray(chart(48, 30, 3))
    rgba = Image.fromarray(chart(48, 30, 4))
    palette = rgb.quantize(16)
    palette.info["transparency"] = 3
    Image.fromarray(chart(1100, 24, 3)).save(folder / "wide_turned.jpg", exif=exif(6))
    Image.fromarray(chart(20, 1100, 1)[..., 0]).save(folder / "tall_grey.jpg")
    rgb.save(folder / "mirrored.png", exif=exif(7))
    rgba.save(folder / "transparent.png")
    rgba.convert("LA").save(folder / "transparent_grey.png")
    palette.save(folder / "palette.png")
    Image.fromarray(chart(48, 30, 4), "CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(chart(48, 30, 1)[..., 0]).convert("1").save(folder / "one_bit.png")
    Image.fromarray(chart(3, 2, 3)).save(folder / "tiny.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
