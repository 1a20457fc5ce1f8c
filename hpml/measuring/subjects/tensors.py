"""What a subject from outside takes: its input tensors, and arrays to fill them with."""

from __future__ import annotations

import math
import re
import zipfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpml.artifacts.engine import EngineSpec
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.measuring.subjects.base import Subject

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpml.measuring.subjects.base import Arrays

DataType = Literal[
    "float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool",
]  # fmt: skip
DATA_TYPES: tuple[str, ...] = get_args(DataType)
_LARGEST_ROW = 1024**3  # bytes; sizes come from outside
_INPUT = re.compile(r"(?P<shape>\d+(x\d+)*)(:(?P<dtype>\w+))?")


class Tensor(Config):
    """One input: `shape` is without the batch in front."""

    name: str
    position: int  # among the inputs of its subject
    dtype: DataType
    shape: tuple[int, ...]

    @property
    def array(self) -> str:
        """The name of its array in the file of inputs; subjects that take the same get the same numbers."""
        return f"{self.position}:{self.dtype}:{'x'.join(map(str, self.shape))}"

    def draw(self, rows: int, *, seed: int) -> NDArray[Any]:
        """An array (rows, *shape): floats are standard normal, integers 0 or 1.

        0 and 1 are valid as token ids, as masks and as types of tokens.
        """
        import numpy as np

        rng = np.random.default_rng([seed, self.position])
        if self.dtype.startswith("float"):
            return rng.standard_normal((rows, *self.shape), np.float32).astype(self.dtype)
        return rng.integers(0, 2, (rows, *self.shape), np.uint8).astype(self.dtype)

    @property
    def bytes_per_row(self) -> int:
        """What one row of its array takes."""
        import numpy as np

        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Signature:
    """The inputs of a subject. batch: the only batch that it takes, None where that is free."""

    inputs: tuple[Tensor, ...]
    batch: int | None = None


class FromOutside(Subject):
    """A subject whose inputs have to be asked for. `inputs` are those of its `signature`."""

    inputs: tuple[Tensor, ...] = ()

    @abstractmethod
    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """What it takes. sizes: of the dimensions that it leaves open, beside the batch.

        Raises ConfigInvalid that names a dimension whose size is not given, or an input that cannot be made.
        """

    def known(self) -> dict[str, Any]:
        """What is known of it without measuring, as JSON fields of `EngineFigures`; 0 where it is not."""
        return {
            "target": self.subject,
            "precision": "not known",
            "methods": [],
            "size_bytes": 0,
            "parameters": 0,
            "macs": 0,
        }

    def feeds(self, arrays: Arrays) -> dict[str, NDArray[np.generic]]:
        """The array of each input by the input's name."""
        return {tensor.name: arrays[tensor.array] for tensor in self.inputs}


def known_of_engine(spec: EngineSpec) -> dict[str, Any]:
    """What an engine's description says of it, as JSON fields of `EngineFigures`."""
    told = spec.model_dump(mode="json", include={"precision", "methods", "size_bytes", "parameters", "macs"})
    return {"target": str(spec.target["target"]), **told}


def parse_input(text: str, position: int) -> Tensor:
    """The input that "3x32x32" or, for another type than float32, "128:int64" describes.

    Raises ConfigInvalid if it describes none.
    """
    found = _INPUT.fullmatch(text)
    dtype = (found and found["dtype"]) or "float32"
    if not found or dtype not in DATA_TYPES:
        raise ConfigInvalid(
            f"{text!r} is no shape of an input",
            fix="give sizes without the batch, and the type if it is not float32: 3x32x32, 128:int64",
        )
    shape = [int(size) for size in found["shape"].split("x")]
    return Tensor.model_validate(
        {"name": f"input {position}", "position": position, "dtype": dtype, "shape": shape}
    )


def tensor_of(
    subject: str,
    name: str,
    position: int,
    dtype: str,
    dimensions: Sequence[int | str | None],
    sizes: Mapping[str, int],
) -> tuple[Tensor, int | None]:
    """One input as a model tells of it, and its batch if that is fixed.

    dimensions: sizes, or the names of those that are open; one that is None or -1 has no name and is called
    by its input and axis, "mask.2". The first is the batch.
    Raises ConfigInvalid where the batch is missing, a size is not given, or the type is none of numpy's.
    """
    if dtype not in DATA_TYPES:
        raise ConfigInvalid(
            f"{subject} takes {name!r} as {dtype}", why=f"inputs are made as {', '.join(DATA_TYPES)}"
        )
    if not dimensions:
        raise ConfigInvalid(f"{subject} takes {name!r} without dimensions", why="it has no batch in front")
    shape = []
    for axis, size in enumerate(dimensions[1:], start=1):
        if isinstance(size, int) and size >= 0:
            shape.append(size)
            continue
        key = size if isinstance(size, str) and size else f"{name}.{axis}"
        if key not in sizes:
            raise ConfigInvalid(
                f"{subject} leaves the size of {key!r} open",
                why=f"it is axis {axis} of its input {name!r}",
                fix=f"give it: --dim {key}=128",
            )
        shape.append(sizes[key])
    tensor = Tensor.model_validate({"name": name, "position": position, "dtype": dtype, "shape": shape})
    if tensor.bytes_per_row > _LARGEST_ROW:
        raise ConfigInvalid(
            f"{subject} takes {name!r} of {tensor.bytes_per_row:,} bytes a sample",
            why=f"no input is made of more than {_LARGEST_ROW:,}",
        )
    batch = dimensions[0]
    return tensor, batch if isinstance(batch, int) and batch > 0 else None


def write_arrays(file: Path, arrays: Arrays) -> None:
    """An .npz of `arrays`; unlike numpy's own writer it takes any name, "file" too."""
    import numpy as np

    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
