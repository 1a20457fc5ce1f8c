"""Check and use the model in this folder. Needs numpy and onnxruntime, and Pillow to read pictures.

    python bundle.py               check every file's digest, then the answers to the golden images
    python bundle.py PICTURE...    the class of each PNG or JPEG file, and its probability
    python bundle.py IMAGES.npy    the class of each image, uint8 (rows, height, width, channels)

With --json before the names, the answers are a list for programs. requirements.txt has the versions.

In Python:  from bundle import Model; model = Model(); logits = model.predict(model.read("picture.jpg"))
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpml.tasks.packaging.engine_script import (
    INSTALL,
    BundleError,
    Engine,
    distance,
    in_words,
    main,
    warn_of_doubts,
)

_log = logging.getLogger("bundle")


class Model(Engine):
    """The model of a bundle, its files checked: pictures or pixels in, logits and classes out."""

    def preprocess(self, images_nhwc: np.ndarray) -> np.ndarray:
        """uint8 (rows, height, width, channels) to what the network takes, float32 (rows, channels, h, w)."""
        expected = (self.preprocessing[side] for side in ("height", "width", "channels"))
        if images_nhwc.dtype != np.uint8 or images_nhwc.shape[1:] != tuple(expected):
            given = f"{images_nhwc.dtype} {images_nhwc.shape}"
            raise BundleError(f"the images are {given}; preprocessing.json says what they must be")
        mean = np.asarray(self.preprocessing["mean"], np.float32)
        std = np.asarray(self.preprocessing["std"], np.float32)
        scaled = (images_nhwc.astype(np.float32) / np.float32(255) - mean) / std
        return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))

    def read(self, picture: str | Path | IO[bytes]) -> np.ndarray:
        """A picture's file as the training pictures were read: uint8 (1, height, width, channels).

        Raises BundleError if it is not a picture, damaged or too large, or if this bundle takes no pictures.
        """
        file = Path(picture) if isinstance(picture, str) else picture
        try:
            pixels: np.ndarray = self._pictures.read(file, self.preprocessing["pictures"])
        except self._pictures.PictureError as error:
            name = _printable(str(file)) if isinstance(file, Path) else "the picture"
            raise BundleError(f"{name}: {error}") from None
        return pixels[None]

    @cached_property
    def _pictures(self) -> Any:
        """The module pictures.py of this bundle."""
        facts = self.preprocessing.get("pictures")
        if facts is None:
            raise BundleError(
                "this bundle takes no pictures: when its data were prepared, nobody noted how to read them;"
                " give their pixels as IMAGES.npy"
            )
        module = self.module("pictures", "pictures need Pillow")
        if facts["pillow"] != module.PILLOW_VERSION:
            _log.warning("warning: %s", _other_pillow(module, facts))
        return module

    def predict(self, images_nhwc: np.ndarray) -> np.ndarray:
        """Logits, float32 (rows, classes), of uint8 images (rows, height, width, channels)."""
        return self.run({"x_nchw": self.preprocess(images_nhwc)})["logits"]

    def classes(self, images_nhwc: np.ndarray) -> list[str]:
        """The name of each image's most likely class."""
        return [name for name, _ in self.classify(images_nhwc)]

    def classify(self, images_nhwc: np.ndarray) -> list[tuple[str, float]]:
        """The name of each image's most likely class, and its probability by the softmax of the logits."""
        names = self.preprocessing["class_names"]
        logits = self.predict(images_nhwc).astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return [(names[row.argmax()], float(row.max())) for row in shares]

    def check(self) -> dict[str, float]:
        """Answer the golden images; how far the answers are from the stored ones.

        Raises BundleError beyond the bundle's tolerance.
        """
        golden = self.bundle["golden"]
        images_nhwc, x_nchw, expected = (
            np.load(self.folder / golden[name], allow_pickle=False) for name in ("images", "x", "logits")
        )
        if np.abs(self.preprocess(images_nhwc) - x_nchw).max() > 1e-5:
            raise BundleError("preprocessing.json does not turn the golden images into the golden inputs")
        logits = self.predict(images_nhwc)
        error = distance(logits, expected)
        same = float((logits.argmax(axis=1) == expected.argmax(axis=1)).mean())
        if not error <= golden["tolerance"] or same < 1:
            raise BundleError(
                f"the model answers otherwise than when it was made: a logit differs by {error:.3g}"
                f" (allowed {golden['tolerance']:g}), {same:.0%} of the golden images get the same class"
            )
        return {"max_abs_error": error, "top1_agreement": same} | self._check_pictures()

    def _check_pictures(self) -> dict[str, float]:
        """Read the golden pictures: their pixels have to be those of training, bit for bit.

        How many there are; none is read where Pillow is absent, which is said. Raises BundleError.
        """
        golden = self.bundle.get("golden_pictures")
        if golden is None:
            return {}
        try:
            pictures = self._pictures
        except BundleError as error:
            _log.warning("warning: the golden pictures were not checked: %s", error)
            return {"golden_pictures": 0}
        facts = self.preprocessing["pictures"]
        pixels = []
        for name, digest in facts["golden_sha256"]:
            pixels.append(pictures.read_golden(self.folder / golden["folder"] / name, facts))
            if pictures.pixels_sha256(pixels[-1]) != digest:
                other = facts["pillow"] != pictures.PILLOW_VERSION
                why = f": {_other_pillow(pictures, facts)}" if other else ""
                raise BundleError(f"{name} has other pixels here than where the data were prepared{why}")
        expected = np.load(self.folder / golden["logits"], allow_pickle=False)
        off = distance(self.predict(np.stack(pixels)), expected)
        if not off <= self.bundle["golden"]["tolerance"]:
            raise BundleError(
                f"the model answers the golden pictures otherwise than when it was made, by {off:.3g}"
            )
        return {"golden_pictures": len(pixels)}


def _other_pillow(pictures: Any, facts: dict[str, Any]) -> str:
    return (
        f"Pillow is {pictures.PILLOW_VERSION} here, the data were prepared with {facts['pillow']},"
        f" and another version may decode or resample otherwise: {INSTALL}"
    )


def _answers(model: Model, name: str) -> Iterator[dict[str, Any]]:
    """What the model says of a picture, or of each row of a .npy file."""
    if name.endswith(".npy"):
        answers = model.classify(np.load(name, allow_pickle=False))
        for row, (class_name, probability) in enumerate(answers):
            yield {"file": name, "row": row, "class": class_name, "probability": probability}
    else:
        [(class_name, probability)] = model.classify(model.read(name))
        yield {"file": name, "class": class_name, "probability": probability}


def _line(answer: dict[str, Any]) -> str:
    if "row" in answer:
        return str(answer["class"])
    return f"{_printable(answer['file'])}: {answer['class']}, probability {answer['probability']:.3f}"


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _run(arguments: list[str]) -> int:
    as_json = arguments[:1] == ["--json"]
    names = arguments[as_json:]
    if (as_json and not names) or any(name.startswith("-") for name in names):
        print("usage: python bundle.py [[--json] PICTURE|IMAGES.npy ...]", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # Pillow's, of files that it reads anyway; the others are refused
    model = Model()
    warn_of_doubts(model)
    if not names:
        print(json.dumps(model.check()))
    status = 0
    found = []
    for name in names:
        try:
            answers = list(_answers(model, name))
        except (BundleError, OSError, ValueError) as error:
            print(f"error: {in_words(error)}", file=sys.stderr)
            status = 5
            continue
        found += answers
        if not as_json:
            print("\n".join(map(_line, answers)))
    if as_json:
        print(json.dumps(found))
    return status


if __name__ == "__main__":
    main(_run)
