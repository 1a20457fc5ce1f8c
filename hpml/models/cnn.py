"""A small convolutional network: trains in seconds, for labs and for tests."""

from __future__ import annotations

from torch import Tensor, nn


class Cnn(nn.Module):
    """Three 3x3 convolutions with strides 1, 2, 2, then a linear head over the mean of the positions.

    width: the number of channels of the first.
    """

    def __init__(self, *, in_channels: int, num_classes: int, width: int = 16) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} is less than 1")
        sizes = (in_channels, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for before, after, stride in zip(sizes, sizes[1:], (1, 2, 2), strict=False):
            convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_channels, height, width) to logits (batch, num_classes)."""
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits
