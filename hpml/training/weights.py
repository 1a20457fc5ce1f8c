"""Trained weights that a user brings: a safetensors file, checked against the network by name and shape.

Of torch's own format only the fact is seen: it is a pickle, which runs code when it is read.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpml.core import regular_files
from hpml.core.contract import Output, canonical_json
from hpml.core.errors import ConfigInvalid
from hpml.io import storage
from hpml.io.storage import S3Uri

if TYPE_CHECKING:
    from torch import Tensor, nn

WeightsFile = S3Uri | Path
Layout = dict[str, tuple[list[int], bool]]  # by name: shape, and whether the numbers are floating-point

_PICKLES = (b"PK\x03\x04", b"\x80")  # how a file of torch.save begins: a zip of pickles, or a pickle
_CONVERSION = (
    "convert it where you trust it: torch.load(FILE, weights_only=True), then safetensors.torch.save_file;"
    " docs/bring-your-own.md has the lines"
)
_NAMED = 4  # names of a kind that a message lists
_NAME_LENGTH = 80


def unsupported_reason(given: WeightsFile) -> str:
    """Why `given` cannot be a file of weights; empty if it can. What is in S3 is asked when it is read."""
    if isinstance(given, str):
        return ""
    if why := regular_files.problem(given):
        return f"{given} {why}: check `weights` in the recipe"
    with given.open("rb") as file:
        begin = file.read(16)
    if begin.startswith(_PICKLES):
        return f"{given} is a pickle of torch, which runs code when it is read; {_CONVERSION}"
    return ""


def fingerprint(given: WeightsFile) -> str:
    """A digest of the file's content (in S3: its ETag); empty if it cannot be read. Raises Unavailable."""
    if isinstance(given, str):
        return hashlib.sha256(canonical_json(storage.etags(given)).encode()).hexdigest()
    if unsupported_reason(given):
        return ""
    return regular_files.sha256(given)


def name_of(given: WeightsFile) -> str:
    """What a manifest calls it: its address, or its name on this machine."""
    return given if isinstance(given, str) else given.name


def load_into(model: nn.Module, given: WeightsFile, out: Output) -> str:
    """Give `model` the weights of a file; returns the file's SHA-256.

    Raises ConfigInvalid if the file is not safetensors or is damaged, if their names, shapes or kinds of
    numbers are not those of `model`, or if they are not finite; Unavailable.
    """
    from safetensors.torch import load_file

    with _here(given, out) as file:
        if problem := unsupported_reason(file):
            raise ConfigInvalid(f"the weights at {given} cannot be used", why=problem)
        check_fit(layout(file, given), model.state_dict(), given)
        with _safetensors(given):
            weights = load_file(file)
        digest = regular_files.sha256(file)
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigInvalid(f"weights in {given} are not finite", why=listed(broken))
    model.load_state_dict(weights)
    return digest


@contextmanager
def _here(given: WeightsFile, out: Output) -> Iterator[Path]:
    """The file on this machine. Fetched for each worker of a group by itself: they share a scratch folder."""
    if isinstance(given, Path):
        yield given
        return
    if "" not in storage.etags(given):
        raise ConfigInvalid(f"there is no object at {given}", fix="check `weights` in the recipe")
    with tempfile.TemporaryDirectory(dir=out.scratch) as folder:
        file = Path(folder, "weights.safetensors")
        storage.fetch_file(given, file)
        yield file


@contextmanager
def _safetensors(given: WeightsFile) -> Iterator[None]:
    """Raises ConfigInvalid where the library cannot read the file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        what, why = f"{given} is not a whole file of safetensors", " ".join(str(error).split())[:200]
        raise ConfigInvalid(what, why=why, fix=_CONVERSION) from None


def layout(file: Path, given: WeightsFile) -> Layout:
    """Of each tensor in `file`, which came from `given`. Reads the header only.

    Raises ConfigInvalid if the file is not safetensors, or is damaged.
    """
    from safetensors import safe_open

    with _safetensors(given), safe_open(file, framework="pt") as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        is_float = {name: str(part.get_dtype()).startswith(("F", "BF")) for name, part in parts.items()}
        return {name: (list(part.get_shape()), is_float[name]) for name, part in parts.items()}


def check_fit(found: Layout, wanted: Mapping[str, Tensor], given: WeightsFile) -> None:
    """Raise ConfigInvalid unless `found` in the file is what the network wants, by its `state_dict`."""
    pairs = [(name, *found[name], tensor) for name, tensor in wanted.items() if name in found]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": [
            f"{_short(name)} {shape} instead of {list(tensor.shape)}"
            for name, shape, _, tensor in pairs
            if shape != list(tensor.shape)
        ],
        "integers for floating-point numbers, or the reverse": [
            name for name, _, is_float, tensor in pairs if is_float != tensor.is_floating_point()
        ],
    }
    problems = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise ConfigInvalid(
            f"the weights in {given} are not those of the network",
            why="; ".join(problems),
            fix="set train.model to the architecture and the arguments that they were trained with",
        )


def listed(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(_short(name) for name in list(names)[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
