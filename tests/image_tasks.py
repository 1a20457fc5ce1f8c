"""Image classification of any shape, for tests that need no real images."""

from __future__ import annotations

import numpy as np
import torch

from hpml.tasks.image_classification.task import ImageClassification
from hpml.tasks.judging import Judgement


def image_task(
    shape_chw: tuple[int, int, int] = (1, 8, 8), *, classes: int = 10, mean: float = 0.0, std: float = 1.0
) -> ImageClassification:
    """The task of images of a shape (channels, height, width); every channel has the same mean and std."""
    channels, height, width = shape_chw
    return ImageClassification(
        class_names=tuple(str(number) for number in range(classes)),
        image_shape_hwc=(height, width, channels),
        mean=(mean,) * channels,
        std=(std,) * channels,
    )


def judgement_of_logits(logits: np.ndarray, labels: np.ndarray) -> Judgement:
    """What these logits (rows, classes) are worth for images of these labels."""
    task = image_task(classes=logits.shape[1])
    told = task.statistics(torch.from_numpy(logits), {"labels": torch.from_numpy(labels)})
    return Judgement(task, {name: tensor.numpy() for name, tensor in told.items()}, {"logits": logits})
