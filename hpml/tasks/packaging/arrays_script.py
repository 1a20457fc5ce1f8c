"""Check and use the model in this folder. Needs numpy and onnxruntime.

    python bundle.py                     check every file's digest, then the answers to the golden samples
    python bundle.py IN.npz              the outputs for its arrays, named as the inputs are, rows in front
    python bundle.py IN.npz --out O.npz  the same, written as arrays
    python bundle.py FILE.json           the answers of processing.py, where the bundle has one

With --operation NAME another operation than the first of bundle.json. requirements.txt has the versions.

In Python:  from bundle import Model; outputs = Model().predict({"input": array})
"""

from __future__ import annotations

import argparse
import json
import zipfile
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpml.tasks.packaging.engine_script import (
    BundleError,
    Engine,
    distance,
    main,
    of_runtime,
    read_json,
    warn_of_doubts,
)


class Model(Engine):
    """The model of a bundle, its files checked: named arrays in, named arrays out."""

    def predict(self, inputs: Mapping[str, np.ndarray], operation: str = "") -> dict[str, np.ndarray]:
        """The outputs of an operation, "" for the first, by name; `inputs` have rows in front.

        Raises BundleError if they are not those of the operation.
        """
        told = self._told(operation)
        expected = {one["name"]: one for one in told["inputs"]}
        if inputs.keys() != expected.keys():
            raise BundleError(f"the inputs are {', '.join(inputs)}; {_in_words(told)}")
        feeds = {}
        for name, array in inputs.items():
            dtype, shape = DTYPES[expected[name]["datatype"]], expected[name]["shape"]
            fits = len(shape) == array.ndim and all(
                size in (-1, own) for size, own in zip(shape, array.shape, strict=True)
            )
            if not fits or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise BundleError(f"{name} is {array.dtype} {array.shape}; {_in_words(told)}")
            feeds[name] = array.astype(dtype)
        try:
            return self.run(feeds, operation)
        except BundleError:
            raise
        except Exception as error:  # ONNX Runtime's derive from nothing narrower
            raise BundleError(
                f"the engine refuses these inputs ({of_runtime(error)}): sizes that are free, -1, have to"
                f" agree as those of the golden samples do, here they are {_shapes(feeds)}"
            ) from None

    def answer(self, raw: Any) -> Any:
        """What processing.py makes of `raw`, as parsed from JSON, and of the outputs for it.

        Raises BundleError if the bundle has no processing.py, or if that cannot use `raw`.
        """
        processing = self._processing
        try:
            inputs = processing.preprocess(raw, self.preprocessing)
            return processing.postprocess(self.predict(inputs), self.preprocessing)
        except BundleError:
            raise
        except Exception as error:  # a task's own code, of what it was not made for
            raise BundleError(
                f"processing.py cannot use this input ({type(error).__name__}: {error}):"
                " its preprocess() shows what it reads"
            ) from None

    def check(self) -> dict[str, float]:
        """Answer the golden samples of every operation; how far the answers are from the stored ones.

        Raises BundleError beyond the bundle's tolerance, and if processing.py cannot be imported.
        """
        largest = 0.0
        for told in self.bundle["operations"]:
            outputs = self.predict(self.golden(told, "inputs"), told["name"])
            for name, expected in self.golden(told, "outputs").items():
                error, allowed = distance(outputs[name], expected), told["tolerance"][name]
                if not error <= allowed:
                    raise BundleError(
                        f"the model answers otherwise than when it was made: {name} of {told['name']}"
                        f" differs by {error:.3g} (allowed {allowed:.3g})"
                    )
                largest = max(largest, error)
        if "processing" in self.bundle:
            assert self._processing
        return {"max_abs_error": largest}

    @cached_property
    def _processing(self) -> Any:
        if "processing" not in self.bundle:
            raise BundleError("this bundle has no processing.py: give its inputs as arrays, INPUTS.npz")
        return self.module("processing", "processing.py needs a library")

    def _told(self, operation: str) -> dict[str, Any]:
        if operation and operation not in self.operations:
            raise BundleError(f"there is no operation {operation!r}; there are {', '.join(self.operations)}")
        told: dict[str, Any] = self.operations[operation or next(iter(self.operations))]
        return told


# In the words of the Open Inference Protocol.
DTYPES = {"FP32": "float32", "FP16": "float16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}


def _in_words(told: Mapping[str, Any]) -> str:
    taken = (f"{one['name']} {DTYPES[one['datatype']]} {one['shape']}" for one in told["inputs"])
    return f"{told['name']} takes {', '.join(taken)}, -1 being any size"


def _shapes(feeds: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.shape}" for name, array in feeds.items())


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python bundle.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="INPUTS.npz|FILE.json")
    parser.add_argument("--out", type=Path, metavar="FILE.npz")
    parser.add_argument("--operation", default="", metavar="NAME")
    given = parser.parse_args(arguments)
    is_json = given.file and given.file.suffix == ".json"
    if given.out and (is_json or not given.file):
        parser.error("--out is for the outputs of INPUTS.npz")
    model = Model()
    warn_of_doubts(model)
    if not given.file:
        print(json.dumps(model.check()))
    elif is_json:
        _print(model.answer(read_json(given.file, "give a file of JSON, UTF-8")))
    elif given.out:
        _write_arrays(given.out, model.predict(_read_arrays(given.file), given.operation))
    else:
        _print(model.predict(_read_arrays(given.file), given.operation))
    return 0


def _print(answer: Any) -> None:
    print(json.dumps(answer, default=lambda array: array.tolist()))


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    reason = ""
    try:
        arrays = np.load(file, allow_pickle=False)
        if isinstance(arrays, np.lib.npyio.NpzFile):
            return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = f" ({error})"
    raise BundleError(
        f"{file} is no .npz file of named arrays{reason}: numpy.savez({file.name!r}, NAME=array) writes one"
    )


def _write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """As numpy's own writer, which does not take any name."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


if __name__ == "__main__":
    main(_run)
