"""A small convolutional network: trains in seconds, for labs and for tests."""

from __future__ import annotations

from torch import Tensor, nn


class Cnn(nn.Module):
    """Three 3x3 convolutions with strides 1, 2, 2, then a linear head over the mean of the positions."""

    def __init__(self, in_channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        sizes = (in_channels, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for index in range(3):
            layers += [
                nn.Conv2d(sizes[index], sizes[index + 1], 3, 1 if index == 0 else 2, 1, bias=False),
                nn.BatchNorm2d(sizes[index + 1]),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits


def cnn(*, in_channels: int, num_classes: int, width: int = 16) -> Cnn:
    """The small network; `width` is the number of channels of its first convolution."""
    if width < 1:
        raise ValueError(f"width {width} is less than 1")
    return Cnn(in_channels, num_classes, width)
