"""The few functions of safetensors that training and the eager engine call, for a Python that lacks it.

For `make test-gpu` only: so that torch and numpy alone show the GPU path. It checks nothing of what it reads.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import ModuleType

import torch

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def install() -> None:
    """Put the stand-in where `import safetensors` finds it."""
    package, for_torch = ModuleType("safetensors"), ModuleType("safetensors.torch")
    package.__version__ = "stand-in"  # type: ignore[attr-defined]
    package.SafetensorError = ValueError  # type: ignore[attr-defined]
    for function in (save, load, save_file, load_file):
        setattr(for_torch, function.__name__, function)
    sys.modules.update({"safetensors": package, "safetensors.torch": for_torch})


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The file's bytes."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    content = b""
    for name, tensor in tensors.items():
        begin = len(content)
        content += tensor.contiguous().numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(content)],
        }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file's bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    content = data[8 + length :]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = torch.frombuffer(bytearray(content[begin:end]), dtype=_DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def save_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a file."""
    Path(file).write_bytes(save(tensors))


def load_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file."""
    return load(Path(file).read_bytes())
