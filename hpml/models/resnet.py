"""ResNet-18 for 32x32 images (He et al. 2016, arXiv:1512.03385, with the 3x3 stem of its CIFAR variants)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: four pairs of blocks; `width` 64 is the standard network."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} is less than 1")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        sizes = (width, width, 2 * width, 4 * width, 8 * width)
        self.groups = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(before, after, stride), BasicBlock(after, after, 1))
                for before, after, stride in zip(sizes, sizes[1:], (1, 2, 2, 2), strict=False)
            )
        )
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        features = self.groups(self.stem(x))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
