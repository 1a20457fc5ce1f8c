"""A split of a dataset, whole, on the device that trains."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from components.artifacts import Artifact, DatasetSpec, InputSpec
from components.images import load_split


class ImageSet:
    """The images of a split as uint8 (rows, channels, height, width), and their labels int64 (rows,)."""

    def __init__(
        self, data: Artifact[DatasetSpec], split: str, input_spec: InputSpec, device: torch.device
    ) -> None:
        images_nhwc, labels = load_split(data, split)
        self.images_nchw = torch.from_numpy(np.array(images_nhwc)).to(device).permute(0, 3, 1, 2)
        self.labels = torch.from_numpy(labels).to(device)
        self._mean = torch.tensor(input_spec.mean, device=device)[:, None, None]
        self._std = torch.tensor(input_spec.std, device=device)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def pixels_nchw(self, rows: Tensor | slice) -> Tensor:
        """The images of `rows` as float32 in 0..1."""
        return self.images_nchw[rows].float() / 255

    def normalise(self, pixels_nchw: Tensor, memory_format: torch.memory_format) -> Tensor:
        """What the network takes: (pixel - mean) / std, in the given layout."""
        return ((pixels_nchw - self._mean) / self._std).contiguous(memory_format=memory_format)
