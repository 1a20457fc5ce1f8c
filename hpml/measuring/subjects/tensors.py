"""What a subject from outside takes: its input tensors, and arrays to fill them with."""

from __future__ import annotations

import math
import re
import zipfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.operation import Operation, free_names
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.measuring.subjects.base import Subject
from hpml.measuring.subjects.fills import Fill, by_name

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
# Name, type and dimensions of an input: sizes, or the names of those that are open; None: without a name.
Declared = tuple[str, str, Sequence[int | str | None]]
_INPUT = re.compile(r"(?P<shape>\d+(x\d+)*)(:(?P<dtype>\w+))?")


class Tensor(Config):
    """One input: `shape` is without the batch in front.

    fill: what the model tells of its numbers; None: what its name does. source: the array of the user's
    samples that it is fed with; empty where it is filled.
    """

    name: str
    position: int  # among the inputs of its subject
    dtype: DataType
    shape: tuple[int, ...]
    fill: Fill | None = None
    source: str = ""

    @property
    def array(self) -> str:
        """The name of its array in the file of inputs; subjects that take the same get the same numbers."""
        if self.source:
            return f"{self.source}:{self.dtype}"
        return f"{self.position}:{self.dtype}:{'x'.join(map(str, self.shape))}"

    @property
    def samples(self) -> str:
        """What its numbers are, however many bits they have: int32 and int64 ids are the same."""
        kind = "float" if self.dtype.startswith("float") else "integer"
        return self.source or f"{self.position}:{kind}:{'x'.join(map(str, self.shape))}"

    @property
    def filling(self) -> Fill:
        """What it is filled with where nobody gave samples."""
        return self.fill or by_name(self.name, self.dtype)

    def draw(self, rows: int, *, seed: int) -> NDArray[Any]:
        """An array (rows, *shape) of its `filling`."""
        import numpy as np

        rng = np.random.default_rng([seed, self.position])
        return self.filling.draw(self.name, (rows, *self.shape), self.dtype, rng)

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
    def declared_inputs(self) -> Sequence[Declared]:
        """Its inputs as it tells of them, batch first. Raises what `signature` does."""

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

    dimensions: as in `Declared`, the first is the batch; see `open_size` for those that are open.
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
        key = open_size(name, axis, size)
        if key and key not in sizes:
            raise ConfigInvalid(
                f"{subject} leaves the size of {key!r} open",
                why=f"it is axis {axis} of its input {name!r}",
                fix=f"give it: --dim {key}=128, or real samples: --data FILE.npz",
            )
        shape.append(sizes[key] if key else size)
    tensor = Tensor.model_validate({"name": name, "position": position, "dtype": dtype, "shape": shape})
    if tensor.bytes_per_row > _LARGEST_ROW:
        raise ConfigInvalid(
            f"{subject} takes {name!r} of {tensor.bytes_per_row:,} bytes a sample",
            why=f"no input is made of more than {_LARGEST_ROW:,}",
        )
    batch = dimensions[0]
    return tensor, batch if isinstance(batch, int) and batch > 0 else None


def operation_named(where: str, operations: Sequence[Operation], name: str) -> Operation:
    """One of the operations of `where`; "" is the first. Raises ConfigInvalid that names them."""
    known = {one.name: one for one in operations}
    if name and name not in known:
        raise ConfigInvalid(f"{where} has no operation {name!r}", fix=f"give one of {', '.join(known)}")
    return known[name or next(iter(known))]


def operation_tensors(
    where: str,
    operation: Operation,
    sizes: Mapping[str, int],
    golden: Mapping[str, Path] = MappingProxyType({}),
    graph: Path | None = None,
) -> tuple[Tensor, ...]:
    """What an operation of `where` takes. golden: the file of a golden sample of each input. graph: its file.

    sizes: of the dimensions that are free; those that are not given are as in the golden samples. Raises
    ConfigInvalid for sizes that contradict each other.
    """
    from hpml.measuring.subjects.onnx_fills import fills
    from hpml.targets.onnx_file import read_graph

    known = {**_golden_sizes(operation, golden), **sizes}
    told = fills(read_graph(graph)) if graph and graph.suffix == ".onnx" else {}
    found = []
    for place, one in enumerate(operation.inputs):
        shape = [_added_up(one.name, size, known) for size in one.shape]
        tensor, _ = tensor_of(where, one.name, place, one.dtype, shape, known)
        found.append(tensor.model_copy(update={"fill": told.get(one.name)}))
    return tuple(found)


def _golden_sizes(operation: Operation, golden: Mapping[str, Path]) -> dict[str, int]:
    import numpy as np

    sizes: dict[str, int] = {}
    for one in (tensor for tensor in operation.inputs if tensor.name in golden):
        shape = np.load(golden[one.name], mmap_mode="r", allow_pickle=False).shape
        of_dimensions = zip(one.shape[1:], shape[1:], strict=False)
        sizes |= {name: size for name, size in of_dimensions if isinstance(name, str)}
    return {name: size for name, size in sizes.items() if len(free_names(name)) == 1}


def _added_up(name: str, size: int | str, sizes: Mapping[str, int]) -> int | str:
    """A size that is the sum of others, such as "past + sequence"."""
    parts = free_names(size)
    if len(parts) < 2 or not all(part in sizes for part in parts):
        return size
    added = sum(sizes[part] for part in parts)
    if sizes.get(str(size), added) != added:
        raise ConfigInvalid(
            f"the input {name!r} has the size {size!r}",
            why=f"that is {added} by the other inputs, and {sizes[str(size)]} is given",
        )
    return added


def open_size(name: str, axis: int, size: int | str | None) -> str:
    """What a size that is left open is called, by itself or as input and axis, "mask.2"; empty if none."""
    if isinstance(size, int) and size >= 0:
        return ""
    return size if isinstance(size, str) and size else f"{name}.{axis}"


def write_arrays(file: Path, arrays: Arrays) -> None:
    """An .npz of `arrays`; unlike numpy's own writer it takes any name, "file" too."""
    import numpy as np

    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
