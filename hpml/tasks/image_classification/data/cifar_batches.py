"""The batches of CIFAR-10 as published, in both forms, read without unpickling anything.

The python form is a dict that Python 2 pickled (protocol 2). Unpickling runs what a file says; here its
opcodes are only listed (`pickletools.genops`), and labels and pixels are picked out of that list.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.core.errors import StageFailed
from hpml.tasks.image_classification.data.loaded import Images

SHAPE_CHW = (3, 32, 32)
PIXELS = 3 * 32 * 32
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
MOST_BYTES = 64 * 2**20  # of one batch; the published ones have 31 MB

# All that the pickle of a dict of strings, numbers, lists and one array needs, in protocol 2.
_STRUCTURE = frozenset(
    {"PROTO", "MARK", "STOP", "NONE", "GLOBAL", "REDUCE", "BUILD"}
    | {"EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"}
    | {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
    | {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
)
_STRINGS = frozenset(("BINSTRING", "SHORT_BINSTRING"))
_NUMBERS = frozenset(("BININT", "BININT1", "BININT2"))
_BOOLEANS = {"NEWTRUE": True, "NEWFALSE": False}
_GLOBALS = frozenset(("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"))
_KEYS = frozenset(("batch_label", "labels", "data", "filenames"))


def find_batches(folder: Path) -> list[Path]:
    """The six batch files, the one for testing last, in `folder` or in the one folder of a published archive.

    Raises StageFailed if one is missing.
    """
    for place in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix in ("", ".bin"):
            files = [place / f"{name}{suffix}" for name in BATCHES]
            missing = [file.name for file in files if not file.is_file()]
            if not missing:
                return files
            if len(missing) < len(files):
                raise StageFailed(
                    f"{place} is not CIFAR-10 as published",
                    why=f"{', '.join(missing)} missing",
                    fix="fetch the archive again",
                )
    raise StageFailed(
        f"{folder} is not CIFAR-10 as published",
        why=f"it has no {BATCHES[0]} and no {BATCHES[0]}.bin",
        fix="give cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or a folder extracted from one",
    )


def read_batches(files: list[Path]) -> Images:
    """Several batch files as one: images uint8 (rows, 32, 32, 3).

    Raises StageFailed naming the file that is damaged.
    """
    images, labels, names = [], [], []
    for file in files:
        read = _read_binary if file.suffix == ".bin" else _read_python
        try:
            if (size_bytes := file.stat().st_size) > MOST_BYTES:
                raise ValueError(f"it has {size_bytes} bytes")
            batch_chw, batch_labels = read(file)
        except ValueError as error:
            raise StageFailed(
                f"{file} is damaged or no batch of CIFAR-10", why=str(error), fix="fetch the archive again"
            ) from None
        images.append(batch_chw.transpose(0, 2, 3, 1))
        labels.append(batch_labels)
        names += [f"{file.name} row {row}" for row in range(len(batch_labels))]
    return Images(np.concatenate(images), np.concatenate(labels), names)


def _read_binary(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of one label byte and 3072 pixel bytes."""
    content = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    if len(content) == 0 or len(content) % (1 + PIXELS):
        raise ValueError(f"{len(content)} bytes are not a whole number of records of {1 + PIXELS}")
    records = content.reshape(-1, 1 + PIXELS)
    return records[:, 1:].reshape(-1, *SHAPE_CHW), records[:, 0].astype(np.int64)


def _read_python(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    values = _values_by_key(file)
    labels = values.get("labels", [])
    data = values.get("data", [])
    if not labels or any(type(label) is not int for label in labels):
        raise ValueError("its labels are not a list of integers")
    # An array's pickled state ends with whether it is in Fortran order, and its raw bytes.
    shape, state = (len(labels), PIXELS), data[-2:]
    raw = state[-1].encode("latin-1") if state and isinstance(state[-1], str) else b""
    if len(raw) != len(labels) * PIXELS or "u1" not in data:
        raise ValueError(f"its data is not an array of bytes of shape {shape}")
    array = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if state[0] else "C")
    return array.reshape(-1, *SHAPE_CHW), np.array(labels, dtype=np.int64)


def _values_by_key(file: Path) -> dict[str, list[Any]]:
    """For each key of the pickled dict, the strings, numbers and truth values that make up its value."""
    found: dict[str, list[Any]] = {}
    values: list[Any] = []
    with file.open("rb") as stream:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in _STRINGS and argument in _KEYS:
                values = found.setdefault(argument, [])
            elif opcode.name in _STRINGS or opcode.name in _NUMBERS:
                values.append(argument)
            elif opcode.name in _BOOLEANS:
                values.append(_BOOLEANS[opcode.name])
            elif opcode.name not in _STRUCTURE:
                raise ValueError(f"its pickle holds {opcode.name}, which a batch has no use for")
            elif opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise ValueError(f"its pickle names {argument!r}, which a batch has no use for")
    return found
