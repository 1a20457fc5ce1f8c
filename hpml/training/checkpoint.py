"""Checkpoints: one safetensors file each, whole or absent, named by its step and its digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpml import models
from hpml.core.atomic_files import write_bytes_atomic

KEEP = 2  # the newest, and the one before it in case the newest is damaged


@dataclass(frozen=True)
class Checkpoint:
    """What a training needs to go on: named tensors, and `state` of plain JSON values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def to_bytes(self) -> bytes:
        """A safetensors file, the state as JSON in its header."""
        from safetensors.torch import save

        return save(models.copied(self.tensors), metadata={"state": json.dumps(self.state)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """The reverse of `to_bytes`. Raises ValueError if `data` is not that."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return cls(tensors, json.loads(header["__metadata__"]["state"]))
        except (SafetensorError, KeyError) as error:
            raise ValueError(str(error)) from None


class CheckpointStore:
    """The checkpoints of one training, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, synced to the disk before it is there, then drop all but the newest KEEP."""
        self._folder.mkdir(parents=True, exist_ok=True)
        data = checkpoint.to_bytes()
        write_bytes_atomic(self._folder / f"{step:09d}-{hashlib.sha256(data).hexdigest()}.safetensors", data)
        for file in self._files()[KEEP:]:
            file.unlink()

    def read_newest(self) -> bytes | None:
        """The newest whole checkpoint, as `Checkpoint.to_bytes` made it; None if there is none.

        A damaged one is named on stdout and deleted.
        """
        for part in self._folder.glob(".*"):  # what a kill left of a write
            part.unlink()
        for file in self._files():
            data = file.read_bytes()
            if file.stem.partition("-")[2] == hashlib.sha256(data).hexdigest():
                return data
            print(f"the checkpoint {file} is damaged (its SHA-256 is not its name's): using the one before")
            file.unlink()
        return None

    def _files(self) -> list[Path]:
        """Newest first."""
        return sorted(self._folder.glob("*.safetensors"), reverse=True)
