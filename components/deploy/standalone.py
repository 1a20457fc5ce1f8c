"""Check and use the model in this folder. Needs numpy and onnxruntime, nothing else.

    python bundle.py               check every file's digest, then the answers to the golden images
    python bundle.py IMAGES.npy    the class of each image, uint8 (rows, height, width, channels)

In Python:  from bundle import Model; logits = Model().predict(images_nhwc)
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path, PurePosixPath
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # ONNX Runtime reads it when it is imported

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent


class BundleError(Exception):
    """The bundle is damaged, or does not answer as it did when it was made."""


class Model:
    """The model of a bundle, its files checked."""

    def __init__(self, folder: Path = HERE, *, threads: int = 1) -> None:
        """Raises BundleError if a file is missing, changed, or not of the bundle."""
        self.folder = folder
        self.bundle: dict[str, Any] = json.loads((folder / "bundle.json").read_text())
        check_files(folder, self.bundle["files"])
        self.preprocessing: dict[str, Any] = json.loads((folder / "preprocessing.json").read_text())
        self._session = _open(folder / self.bundle["file"], self.bundle["providers"], threads)
        self._input = self.bundle["inputs"][0]["name"]
        self._output = self.bundle["outputs"][0]["name"]
        self._check_signature()

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

    def predict(self, images_nhwc: np.ndarray) -> np.ndarray:
        """Logits, float32 (rows, classes), of uint8 images (rows, height, width, channels)."""
        logits: np.ndarray = self._session.run([self._output], {self._input: self.preprocess(images_nhwc)})[0]
        return logits

    def classes(self, images_nhwc: np.ndarray) -> list[str]:
        """The name of each image's most likely class."""
        names = self.preprocessing["class_names"]
        return [names[index] for index in self.predict(images_nhwc).argmax(axis=1)]

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
        error = float(np.abs(logits - expected).max())
        same = float((logits.argmax(axis=1) == expected.argmax(axis=1)).mean())
        if not error <= golden["tolerance"] or same < 1:
            raise BundleError(
                f"the model answers otherwise than when it was made: a logit differs by {error:.3g}"
                f" (allowed {golden['tolerance']:g}), {same:.0%} of the golden images get the same class"
            )
        return {"max_abs_error": error, "top1_agreement": same}

    def _check_signature(self) -> None:
        """Compare what the engine takes and gives with bundle.json; a free batch is -1 there."""
        for kind, found in (
            ("inputs", self._session.get_inputs()),
            ("outputs", self._session.get_outputs()),
        ):
            shapes = {node.name: [d if isinstance(d, int) else -1 for d in node.shape] for node in found}
            told = {node["name"]: node["shape"] for node in self.bundle[kind]}
            if shapes != told:
                raise BundleError(f"the {kind} of the engine are {shapes}, bundle.json says {told}")


def check_files(folder: Path, digests: dict[str, str]) -> None:
    """Compare the files in `folder` with their SHA-256.

    Raises BundleError naming the file that is missing, changed, or that nobody listed: a server would serve
    an added model as willingly as ours.
    """
    for name, digest in digests.items():
        path = PurePosixPath(name)
        file = folder / name
        if path.is_absolute() or ".." in path.parts or file.is_symlink() or not file.is_file():
            raise BundleError(f"{name} is missing")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise BundleError(f"{name} was changed: its SHA-256 is not the one in bundle.json")
    known = {*digests, "bundle.json", "manifest.json"}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_dir() and name not in known and "__pycache__" not in file.parts:
            raise BundleError(f"{name} does not belong to the bundle")


def _open(file: Path, providers: list[Any], threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    named = [tuple(provider) if isinstance(provider, list) else provider for provider in providers]
    return onnxruntime.InferenceSession(file, options, providers=named)


def main() -> None:
    """The command line; the exit status is 5 where something is not as it should be."""
    try:
        model = Model()
        if len(sys.argv) == 1:
            print(json.dumps(model.check()))
        for name in sys.argv[1:]:
            print("\n".join(model.classes(np.load(name, allow_pickle=False))))
    except (BundleError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(5) from None


if __name__ == "__main__":
    main()
