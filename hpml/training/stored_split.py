"""A split of a dataset for the device that trains: kept there where it fits, else sent in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpml.core.mapped_rows import take

RESIDENT_SHARE = 0.25  # of the free memory of a GPU: a split that takes more is streamed
_AHEAD = 2  # batches that are on their way to a GPU while it works

Rows = Tensor | slice  # a tensor of indices is on the CPU
Batch = dict[str, Tensor]  # the stored arrays of some rows, by name
T = TypeVar("T")


class StoredSplit:
    """The arrays of a split, rows in front, for `device`.

    A CPU reads them from their files, by the system's cache: they may be larger than memory. residence: where
    they are, in words; empty there.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], name: str, device: torch.device) -> None:
        self._arrays, self._device = arrays, device
        self._resident: Batch | None = None
        self.residence = ""
        if device.type == "cuda":
            size_bytes = sum(array.nbytes for array in arrays.values())
            free_bytes = torch.cuda.mem_get_info(device)[0]
            self.residence = _in_words(name, size_bytes, free_bytes)
            if _fits(size_bytes, free_bytes):
                whole = self._read(slice(None))
                self._resident = {key: tensor.to(device) for key, tensor in whole.items()}
            else:
                self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def stream(self, parts: Iterable[Rows]) -> Generator[Batch, None, None]:
        """The arrays of each part in turn, the same wherever they are.

        Close it (contextlib.closing) when no more are wanted: it may have a thread.
        """
        if self._device.type == "cuda" and self._resident is None:
            yield from (self._received(*sent) for sent in ahead(self._sent, parts))
        else:
            yield from map(self._taken, parts)

    def _taken(self, rows: Rows) -> Batch:
        if self._resident is None:
            return self._read(rows)
        chosen = rows if isinstance(rows, slice) else rows.to(self._device)
        return {name: tensor[chosen] for name, tensor in self._resident.items()}

    def _read(self, rows: Rows) -> Batch:
        if isinstance(rows, slice):
            return {name: torch.from_numpy(np.array(array[rows])) for name, array in self._arrays.items()}
        return {name: torch.from_numpy(take(array, rows.numpy())) for name, array in self._arrays.items()}

    def _sent(self, rows: Rows) -> tuple[Batch, torch.cuda.Event]:
        """In a thread of its own: rows on their way, from pinned memory, beside what the GPU computes."""
        pinned = {name: tensor.pin_memory() for name, tensor in self._read(rows).items()}
        with torch.cuda.device(self._device), torch.cuda.stream(self._copying):
            batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return batch, arrived

    def _received(self, batch: Batch, arrived: torch.cuda.Event) -> Batch:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        for tensor in batch.values():
            tensor.record_stream(computing)  # its memory is not used again before that is done with it
        return batch


def ahead(take: Callable[[Rows], T], parts: Iterable[Rows]) -> Iterator[T]:
    """What `take` makes of each part, in their order, in a thread that is some parts ahead."""
    with ThreadPoolExecutor(1, "rows") as pool:
        coming: deque[Future[T]] = deque()
        for part in parts:
            coming.append(pool.submit(take, part))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _fits(size_bytes: int, free_bytes: int) -> bool:
    return size_bytes <= RESIDENT_SHARE * free_bytes


def _in_words(name: str, size_bytes: int, free_bytes: int) -> str:
    fate = "is kept on the GPU" if _fits(size_bytes, free_bytes) else "is sent to the GPU batch by batch"
    limit = f"{RESIDENT_SHARE:.0%} of its free {free_bytes / 1e9:.1f} GB is the limit"
    return f"the {name} split, {size_bytes / 1e9:.3f} GB, {fate}: {limit}"
