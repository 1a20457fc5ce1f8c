"""`--data FILE.npz`: real samples that become the requests of all that is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid
from hpml.measuring.subjects.tensors import DATA_TYPES, Declared, Signature, Tensor, open_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ALIAS = "x"  # the array of whatever has a single input
LABELS = ("y", "labels")  # beside the inputs, as `hpml quantize` takes them
_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2}  # of the kinds of numbers; none is cast to a lower one
_HOW = "numpy.savez(FILE, input_ids=..., attention_mask=...): an array for each input, samples in front"


class SampleFile:
    """Arrays (rows, ...) by name, of which each subject takes those of its inputs."""

    def __init__(self, file: Path, *, called: str = "") -> None:
        """called: what it is in messages, by default `file`.

        Raises ConfigInvalid for a file that holds no such arrays.
        """
        from hpml.tasks.image_classification.data.npz_arrays import read_arrays

        if why := regular_files.problem(file):
            raise ConfigInvalid(f"--data {file} cannot be used", why=f"it {why}", fix=_HOW)
        self.file, self._taken = called or str(file), set[str]()
        self._arrays = read_arrays(file)
        rows = {name: array.shape[0] if array.ndim else 0 for name, array in self._arrays.items()}
        if not rows or not min(rows.values()) or len(set(rows.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise ConfigInvalid(
                f"the arrays of {file} have no samples, or not equally many", why=told or "none", fix=_HOW
            )
        self.rows = next(iter(rows.values()))
        for name, array in self.inputs.items():
            if array.dtype.name not in DATA_TYPES:
                raise ConfigInvalid(
                    f"the array {name!r} of {file} is {array.dtype}",
                    why=f"allowed are {', '.join(DATA_TYPES)}",
                )

    @cached_property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """All arrays but labels; those too, where there is nothing else."""
        return {name: array for name, array in self._arrays.items() if name not in LABELS} or self._arrays

    # ------------------------------------------------------------------------------------- of one subject

    def described(self, where: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`inputs` of what has none by name, such as a torch module: the arrays in the file's order.

        Without `inputs` the arrays say what they are. Raises ConfigInvalid if there are not as many.
        """
        if inputs and len(inputs) != len(self.inputs):
            raise ConfigInvalid(
                f"{where} takes {len(inputs)} inputs, {self.file} has {len(self.inputs)} arrays",
                why=f"they are {', '.join(self.inputs)}, and go to it in this order",
                fix="leave --input out, or give one for each array",
            )
        given: Sequence[Tensor | None] = inputs or [None] * len(self.inputs)
        return tuple(
            Tensor.model_validate(
                {
                    "name": name,
                    "position": position,
                    "dtype": one.dtype if one else array.dtype.name,
                    "shape": one.shape if one else array.shape[1:],
                }
            )
            for position, ((name, array), one) in enumerate(zip(self.inputs.items(), given, strict=True))
        )

    def sizes(self, where: str, declared: Sequence[Declared], given: Mapping[str, int]) -> dict[str, int]:
        """`given`, and what the arrays say of the dimensions that `declared` leaves open.

        Raises ConfigInvalid for an array that is missing or has another shape, and for sizes that
        contradict each other.
        """
        sources = self._sources(where, [name for name, _, _ in declared])
        sizes, told_by = dict(given), dict.fromkeys(given, "--dim")
        for name, dtype, dimensions in declared:
            shape = self._arrays[sources[name]].shape
            fixed = [size if isinstance(size, int) and size >= 0 else None for size in dimensions[1:]]
            if len(shape) != len(dimensions) or any(
                size not in (None, own) for size, own in zip(fixed, shape[1:], strict=True)
            ):
                taken = ", ".join(str(size) if isinstance(size, int) else size or "?" for size in dimensions)
                raise ConfigInvalid(
                    f"the array {sources[name]!r} of {self.file} does not fit {where}",
                    why=f"it is {shape}, its input {name!r} takes {dtype} ({taken}), samples in front",
                )
            for axis, (size, own) in enumerate(zip(dimensions[1:], shape[1:], strict=True), start=1):
                key = open_size(name, axis, size)
                if key and sizes.setdefault(key, own) != own:
                    raise ConfigInvalid(
                        f"{where} takes one size {key!r}, and is given two",
                        why=f"{sizes[key]} by {told_by[key]}, {own} by {sources[name]!r} of {self.file}",
                    )
                told_by.setdefault(key, repr(sources[name]))
        return sizes

    def fed(self, where: str, signature: Signature) -> Signature:
        """`signature` with the arrays as the sources of its inputs.

        Raises ConfigInvalid for one that is missing, does not fit by type or shape, or holds numbers that the
        input cannot take.
        """
        sources = self._sources(where, [tensor.name for tensor in signature.inputs])
        inputs = []
        for tensor in signature.inputs:
            source = sources[tensor.name]
            self._check(where, source, tensor)
            inputs.append(tensor.model_copy(update={"source": source}))
            self._taken.add(source)
        return Signature(tuple(inputs), signature.batch)

    def _sources(self, where: str, names: Sequence[str]) -> dict[str, str]:
        """The array of each input: that of its name, or with a single input x, or the only one there is."""
        missing = [name for name in names if name not in self._arrays]
        if missing and len(names) == 1 and (_ALIAS in self.inputs or len(self.inputs) == 1):
            return {names[0]: _ALIAS if _ALIAS in self.inputs else next(iter(self.inputs))}
        if missing:
            raise ConfigInvalid(
                f"{self.file} has no array for the input {missing[0]!r} of {where}",
                why=f"it has {', '.join(self._arrays)}; {where} takes {', '.join(names)}",
                fix=_HOW,
            )
        return {name: name for name in names}

    def _check(self, where: str, source: str, tensor: Tensor) -> None:
        import numpy as np

        array, what = self._arrays[source], f"the array {source!r} of {self.file}"
        if array.shape[1:] != tensor.shape:
            raise ConfigInvalid(
                f"{what} does not fit {where}",
                why=f"a sample of it is {array.shape[1:]}, its input {tensor.name!r} takes {tensor.shape}",
            )
        if not _is_safe(array, np.dtype(tensor.dtype)):
            raise ConfigInvalid(
                f"{what} does not fit {where}",
                why=f"it is {array.dtype.name}, its input {tensor.name!r} takes {tensor.dtype}, which does "
                "not hold such numbers, or not all of them as they are",
                fix=f"save it as {tensor.dtype}, if that is what you mean: array.astype('{tensor.dtype}')",
            )
        is_whole = array.dtype.kind != "f"
        is_additive_mask = tensor.filling.is_mask and not is_whole  # then -inf hides something
        wrong = np.isnan(array) if is_additive_mask else ~np.isfinite(array)
        if wrong.any():
            rows = _rows_with(wrong)
            raise ConfigInvalid(
                f"{what} holds NaN{'' if is_additive_mask else ' or infinity'}",
                why=f"in {len(rows)} of {self.rows} rows, the first is row {rows[0]}",
                fix="correct or remove these rows",
            )
        wrong = (array != 0) & (array != 1)
        if tensor.filling.is_mask and is_whole and wrong.any():
            rows = _rows_with(wrong)
            first = array[rows[0]][wrong[rows[0]]].flat[0]
            raise ConfigInvalid(
                f"{what} is no mask",
                why=f"row {rows[0]} holds {first}, allowed are 0 and 1 ({tensor.filling.reason}); "
                f"{len(rows)} of {self.rows} rows hold such numbers",
                fix="save 1 and 0, or True and False",
            )
        below = tensor.filling.below
        if below is None or tensor.filling.parts:
            return
        wrong = (array < 0) | (array >= below)
        if wrong.any():
            rows = _rows_with(wrong)
            first = array[rows[0]][wrong[rows[0]]].flat[0]
            raise ConfigInvalid(
                f"{what} holds numbers that {where} has no entry for",
                why=f"row {rows[0]} holds {first}, allowed are 0 to {below - 1} ({tensor.filling.reason}); "
                f"{len(rows)} of {self.rows} rows hold such numbers",
                fix="make the samples with the vocabulary of this model",
            )

    # ------------------------------------------------------------------------------------------- of all

    def check_all_taken(self) -> None:
        """Raise ConfigInvalid for arrays that no subject takes, but for labels."""
        unknown = [name for name in self._arrays if name not in self._taken and name not in LABELS]
        if unknown:
            raise ConfigInvalid(
                f"{self.file} has arrays that nothing takes: {', '.join(unknown)}",
                why=f"taken are {', '.join(sorted(self._taken))}, and labels are left aside",
                fix="save them by the names of the inputs, or leave them out",
            )

    def arrays(self, tensors: Iterable[Tensor], rows: int) -> dict[str, NDArray[Any]]:
        """The first `rows` of what each tensor is fed with, in its type, by the name of its array."""
        import numpy as np

        return {
            tensor.array: np.ascontiguousarray(self._arrays[tensor.source][:rows], tensor.dtype)
            for tensor in tensors
        }


def _is_safe(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` holds all of its numbers as they are; numbers with a point never become whole ones."""
    import numpy as np

    if np.can_cast(array.dtype, dtype, "safe"):
        return True
    if _RANKS[array.dtype.kind] > _RANKS[dtype.kind]:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
        same = (cast == array) & ((cast < 0) == (array < 0))
    return bool((same | (np.isnan(array) if array.dtype.kind == "f" else False)).all())


def _rows_with(wrong: NDArray[np.bool_]) -> NDArray[np.int64]:
    import numpy as np

    return np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))
