"""What a bundle of a picture classifier ships: how pictures become pixels, and pictures to try it with."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hpml.artifacts.operation import Operation
from hpml.core.errors import GateFailed
from hpml.tasks.image_classification.picture_spec import PictureSpec
from hpml.tasks.packaging.base import Packaging, answers_otherwise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.tasks.image_classification.pixels import Normalised
    from hpml.tasks.packaging.base import Answer

_GOLDEN = {"images": "golden_images_nhwc.npy", "x": "golden_x_nchw.npy", "logits": "golden_logits.npy"}
_GOLDEN_PICTURES = {"folder": "golden_pictures", "logits": "golden_picture_logits.npy"}
_PICTURES = "pictures.py"  # a copy of hpml/tasks/image_classification/pictures.py


if TYPE_CHECKING:

    class Pictured(Normalised, Protocol):
        """What a task about pictures knows of them."""

        @property
        def class_names(self) -> tuple[str, ...]: ...

        @property
        def pictures(self) -> PictureSpec | None: ...


class PicturesPackaging(Packaging):
    """`pictures.py` and golden pictures, and the images that the golden inputs were made of."""

    golden_folder: ClassVar[str] = ""
    facts_in_words: ClassVar[str] = "says how pixels become the network's input"
    samples_in_words: ClassVar[str] = f"`{_GOLDEN['images']}` and `{_GOLDEN['logits']}` are sample images"

    def __init__(self, task: Pictured) -> None:
        """Of a task about pictures."""
        channels, height, width = task.shape_chw
        super().__init__(
            {
                "takes": "uint8 pixels, 0 to 255, (rows, height, width, channels)",
                "gives": "x_nchw: float32 (rows, channels, height, width)",
                "steps": [
                    "x = pixel / 255",
                    "x = (x - mean) / std, for each channel",
                    "(rows, height, width, channels) -> (rows, channels, height, width)",
                ],
                "height": height,
                "width": width,
                "channels": channels,
                "mean": task.mean,
                "std": task.std,
                "units": "mean and std are of pixel / 255",
                "class_names": task.class_names,
                "pictures": task.pictures.model_dump(mode="json") if task.pictures else None,
            }
        )
        self._task = task

    @property
    def script(self) -> Path:
        """It reads pictures and names classes."""
        from hpml.tasks.image_classification.packaging import pictures_script

        return Path(pictures_script.__file__)

    @property
    def requirements(self) -> Sequence[str]:
        """Pillow, where pictures are read."""
        if not self._facts:
            return ()
        return (f"pillow=={self._facts.pillow}  # others may decode or resample otherwise",)

    @property
    def needs_in_words(self) -> str:
        """Pillow is for pictures only."""
        return ": numpy and onnxruntime,\nand Pillow if it is to read pictures"

    @property
    def _facts(self) -> PictureSpec | None:
        """How a picture's file becomes pixels; None if the data were prepared before that was noted."""
        return self._task.pictures

    def write(self, bundle: Path, answer: Answer, tolerance: float) -> dict[str, Any]:
        """Golden images and, where it is known how pictures are read, what reads them and golden pictures."""
        self._write_golden_images(bundle)
        if self._facts:
            self._write_golden_pictures(self._facts, answer, bundle)
        return {
            "golden": {**_GOLDEN, "tolerance": tolerance},
            "golden_pictures": _GOLDEN_PICTURES if self._facts else None,
        }

    def _write_golden_images(self, bundle: Path) -> None:
        """The images that the golden inputs were made of: the check covers the preprocessing as well."""
        import numpy as np

        from hpml.tasks.image_classification.pixels import to_x_nchw

        x_nchw = np.load(bundle / _GOLDEN["x"], allow_pickle=False)
        mean, std = (np.asarray(values, np.float32) for values in (self._task.mean, self._task.std))
        pixels_nhwc = (x_nchw.transpose(0, 2, 3, 1) * std + mean) * 255
        images_nhwc = np.rint(pixels_nhwc).clip(0, 255).astype(np.uint8)
        if np.abs(to_x_nchw(images_nhwc, self._task) - x_nchw).max() > 1e-5:
            raise GateFailed(
                "the golden inputs of the engine are not normalised images",
                why="no pixels of 0 to 255 give them under the engine's mean and std",
            )
        np.save(bundle / _GOLDEN["images"], images_nhwc)

    def _write_golden_pictures(self, facts: PictureSpec, answer: Answer, bundle: Path) -> None:
        """The module that reads pictures, files to try it with, and what the engine says of them.

        Raises GateFailed if they have other pixels here than where the data were prepared.
        """
        import numpy as np

        from hpml.tasks.image_classification import pictures
        from hpml.tasks.image_classification.pixels import to_x_nchw

        shutil.copyfile(pictures.__file__, bundle / _PICTURES)
        folder = bundle / _GOLDEN_PICTURES["folder"]
        folder.mkdir()
        for file in pictures.golden_files():
            shutil.copyfile(file, folder / file.name)
        as_noted = facts.model_dump(mode="json")
        pixels = []
        for name, sha256 in facts.golden_sha256:
            pixels.append(pictures.read_golden(folder / name, as_noted))
            if pictures.pixels_sha256(pixels[-1]) != sha256:
                raise GateFailed(
                    f"{name} has other pixels here than where the data were prepared",
                    why=f"Pillow is {pictures.PILLOW_VERSION} here and was {facts.pillow} there",
                    fix="run this step with what prepare ran with, or prepare again",
                )
        logits = answer({"x_nchw": to_x_nchw(np.stack(pixels), self._task)})["logits"]
        np.save(bundle / _GOLDEN_PICTURES["logits"], logits)

    def allowed_error(self, expected: NDArray[Any], tolerance: float) -> float:
        """A logit's, as it is: the classes follow from their differences."""
        return tolerance

    def compare(self, output: str, answer: NDArray[Any], expected: NDArray[Any], allowed: float) -> float:
        """Of logits; their classes have to be the same as well."""
        error = super().compare("a logit", answer, expected, allowed)
        if (answer.argmax(axis=1) != expected.argmax(axis=1)).any():
            raise answers_otherwise("a golden image gets another class")
        return error

    def verified(self, error: float) -> tuple[str, ...]:
        """Images, logits, classes, pictures."""
        read = len(self._facts.golden_sha256) if self._facts else 0
        return (
            "the preprocessing of the golden images",
            f"the golden logits, to {error:.1g}, and every class",
            *((f"the pixels of {read} golden pictures, bit for bit",) if read else ()),
        )

    # -------------------------------------------------------------------------------------------- the README

    def takes(self, operation: Operation) -> str:
        """The images."""
        channels, height, width = self._task.shape_chw
        return f"images of {height} x {width} with {channels} channel{'s' * (channels > 1)}, uint8"

    def gives(self, operation: Operation) -> str:
        """The logits."""
        return f"{len(self._task.class_names)} logits, in the order of `class_names` in preprocessing.json"

    def section(self, operations: Sequence[Operation], *, script: str) -> str:
        """How pictures are read."""
        facts = self._facts
        if facts is None:
            return """\
## Pictures

This bundle takes pixels and no picture files: when its data were prepared, it was not noted how pictures are
read.
"""
        return f"""\
## Pictures

{textwrap.fill(_how_pictures_are_read(facts), 110)}
{_by_script(script) if script else _IN_PYTHON}"""

    def inputs_code(self) -> str:
        """From pixels."""
        return f"""\
how = json.load(open("preprocessing.json"))
images_nhwc = np.load("{_GOLDEN["images"]}")  # or yours
x = (images_nhwc / np.float32(255) - np.float32(how["mean"])) / np.float32(how["std"])
inputs = {{"x_nchw": np.ascontiguousarray(x.transpose(0, 3, 1, 2))}}"""

    def answers_code(self) -> str:
        """Classes."""
        return 'print([how["class_names"][row] for row in outputs["logits"].argmax(axis=1)])'

    def usage_in_words(self, script: str) -> str:
        """From pixels, and from pictures where they are read."""
        reads = ' and `Model().read("photo.jpg")`, which gives images_nhwc of a picture'
        return (
            f"`python {script} IMAGES.npy`, or\n`from bundle import Model`, `Model().predict(images_nhwc)`"
            f"{reads if self._facts else ''}"
        )


def _how_pictures_are_read(facts: PictureSpec) -> str:
    colour = "grey (299 R + 587 G + 114 B) / 1000" if facts.mode == "L" else "RGB"
    (height, width), (within_height, within_width) = facts.size_hw, facts.fit_within_hw
    if facts.resize == "none":
        size = f"All have to be {width} x {height} (width x height), as the training pictures were."
    else:
        size = (
            f"Larger ones are shrunk in proportion into {within_width} x {within_height} (width x height,"
            f" {facts.resampling.title()}), smaller ones are not enlarged, and black around makes them"
            f" {width} x {height}."
        )
    if facts.data_from == "pictures":
        origin = f"as the training pictures were, bit for bit where Pillow is {facts.pillow}"
    else:
        origin = (
            "by convention: the training images came as arrays, not from files. Give pictures that look like"
            " them"
        )
    return (
        f"`{_PICTURES}` turns a {' or '.join(facts.formats)} file into pixels, {origin}. Pictures are turned"
        f" upright by their EXIF tag, laid on black where they are transparent, and made {colour}. {size}"
        " The facts are in preprocessing.json under `pictures`."
    )


def _by_script(script: str) -> str:
    return f"""
    python {script} photo.jpg scan.png          the class of each, and its probability
    python {script} --json photo.jpg scan.png   the same for programs
"""


_IN_PYTHON = f"""
```python
import json, pathlib
from {Path(_PICTURES).stem} import read

facts = json.load(open("preprocessing.json"))["pictures"]
images_nhwc = read(pathlib.Path("photo.jpg"), facts)[None]
```
"""
