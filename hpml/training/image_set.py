"""A split of a dataset for the device that trains: kept there where it fits, else sent in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model_input import InputSpec
from hpml.tasks.images import load_split

RESIDENT_SHARE = 0.25  # of the free memory of a GPU: a split that takes more is streamed
_AHEAD = 2  # batches that are on their way to a GPU while it works

Rows = Tensor | slice  # a tensor of indices is on the CPU
T = TypeVar("T")


class ImageSet:
    """The images of a split, uint8, and their labels, int64 (rows,), on `device`.

    A CPU reads them from their file, by the system's cache. residence: where they are, in words; empty there.
    """

    def __init__(
        self, data: Artifact[DatasetSpec], split: str, input_spec: InputSpec, device: torch.device
    ) -> None:
        self._images_nhwc, labels = load_split(data, split)
        self._device = device
        self._resident_nhwc: Tensor | None = None
        self.residence = ""
        if device.type == "cuda":
            size_bytes, free_bytes = self._images_nhwc.nbytes, torch.cuda.mem_get_info(device)[0]
            self.residence = _in_words(split, size_bytes, free_bytes)
            if _fits(size_bytes, free_bytes):
                self._resident_nhwc = torch.from_numpy(np.array(self._images_nhwc)).to(device)
            else:
                self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.labels = torch.from_numpy(labels).to(device)
        self._mean = torch.tensor(input_spec.mean, device=device)[:, None, None]
        self._std = torch.tensor(input_spec.std, device=device)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def stream(self, parts: Iterable[Rows]) -> Generator[Tensor, None, None]:
        """The images of each part in turn, uint8 (rows, channels, height, width), the same wherever they are.

        Close it (contextlib.closing) when no more are wanted: it may have a thread.
        """
        if self._device.type == "cuda" and self._resident_nhwc is None:
            taken: Iterable[Tensor] = (self._received(*sent) for sent in ahead(self._sent, parts))
        else:
            taken = map(self._read, parts)
        for images_nhwc in taken:
            yield images_nhwc.permute(0, 3, 1, 2)

    def _read(self, rows: Rows) -> Tensor:
        if self._resident_nhwc is not None:
            return self._resident_nhwc[rows if isinstance(rows, slice) else rows.to(self._device)]
        if isinstance(rows, slice):
            return torch.from_numpy(np.array(self._images_nhwc[rows]))
        return torch.from_numpy(self._images_nhwc[rows.numpy()])  # a copy already

    def _sent(self, rows: Rows) -> tuple[Tensor, torch.cuda.Event]:
        """In a thread of its own: images on their way, from pinned memory, beside what the GPU computes."""
        pinned = self._read(rows).pin_memory()
        with torch.cuda.device(self._device), torch.cuda.stream(self._copying):
            images_nhwc = pinned.to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return images_nhwc, arrived

    def _received(self, images_nhwc: Tensor, arrived: torch.cuda.Event) -> Tensor:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(arrived)
        images_nhwc.record_stream(computing)  # its memory is not used again before that is done with it
        return images_nhwc

    def pixels(self, images_nchw: Tensor) -> Tensor:
        """What `stream` gave as float32 in 0..1."""
        return images_nchw.float() / 255

    def normalise(self, pixels_nchw: Tensor, memory_format: torch.memory_format) -> Tensor:
        """What the network takes: (pixel - mean) / std, in the given layout."""
        return ((pixels_nchw - self._mean) / self._std).contiguous(memory_format=memory_format)


def ahead(take: Callable[[Rows], T], parts: Iterable[Rows]) -> Iterator[T]:
    """What `take` makes of each part, in their order, in a thread that is some parts ahead."""
    with ThreadPoolExecutor(1, "images") as pool:
        coming: deque[Future[T]] = deque()
        for part in parts:
            coming.append(pool.submit(take, part))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _fits(size_bytes: int, free_bytes: int) -> bool:
    return size_bytes <= RESIDENT_SHARE * free_bytes


def _in_words(split: str, size_bytes: int, free_bytes: int) -> str:
    fate = "is kept on the GPU" if _fits(size_bytes, free_bytes) else "is sent to the GPU batch by batch"
    limit = f"{RESIDENT_SHARE:.0%} of its free {free_bytes / 1e9:.1f} GB is the limit"
    return f"the {split} split, {size_bytes / 1e9:.3f} GB of images, {fate}: {limit}"
