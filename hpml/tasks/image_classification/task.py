"""Labelled pictures, one class each: small enough for their pixels to be arrays of one shape."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.metric import ACCURACY_TOP1
from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.contract import Config
from hpml.tasks.base import Task
from hpml.tasks.image_classification.picture_spec import PictureSpec
from hpml.tasks.metric import Metric

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hpml.tasks.base import Arrays, Outputs, Tensors
    from hpml.tasks.endpoint import Endpoint
    from hpml.tasks.packaging.base import Packaging

ACCURACY = Metric(**asdict(ACCURACY_TOP1), least=0.0)
X_NCHW, LOGITS = "x_nchw", "logits"


class ImageClassification(Task):
    """Pictures as uint8 pixels NHWC (`images`), each of one class (`labels`, int64).

    The network takes `x_nchw` float32, (pixel / 255 - mean) / std per channel, and gives a logit a class.
    """

    row: ClassVar[str] = "image"
    rows: ClassVar[str] = "images"
    units: ClassVar[str] = "images"
    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY,)
    draws: ClassVar[int] = 7  # see `augment`
    default_architecture: ClassVar[str] = "resnet18"
    architectures: ClassVar[tuple[str, ...]] = ("cnn", "resnet18", "vit")
    shape_options: ClassVar[str] = "data.image_size"

    task: Literal["image_classification"] = "image_classification"
    class_names: tuple[str, ...]
    image_shape_hwc: tuple[int, int, int]
    mean: tuple[float, ...]  # per channel, of pixel / 255 over the train split
    std: tuple[float, ...]
    pictures: PictureSpec | None = None  # None in artifacts of before this was noted

    @property
    def shape_chw(self) -> tuple[int, int, int]:
        """Of an image as the network takes it."""
        height, width, channels = self.image_shape_hwc
        return channels, height, width

    def features(self, stored: Arrays) -> dict[str, NDArray[Any]]:
        """`x_nchw` of the images."""
        from hpml.tasks.image_classification.pixels import to_x_nchw

        return {X_NCHW: to_x_nchw(stored["images"], self)}

    def calibration_rows(self, data: Artifact[DatasetSpec], count: int, seed: int) -> NDArray[np.int64]:
        """As many of each class as its share of the split, every class at least once if `count` allows it."""
        from hpml.tasks.image_classification.data.splits import stratified_sample

        labels = self.stored(data, "train")["labels"]
        return stratified_sample(labels, len(self.class_names), count, seed)

    def data_in_words(self) -> str:
        """How many classes."""
        return f"{len(self.class_names)} classes"

    def row_in_words(self) -> str:
        """Such as "images of 1x8x8 (channels x height x width)"."""
        return f"images of {'x'.join(map(str, self.shape_chw))} (channels x height x width)"

    def output_shape(self, rows: int) -> tuple[int, ...]:
        """A logit a class."""
        return rows, len(self.class_names)

    def model_arguments(self) -> dict[str, JsonValue]:
        """The channels of the images, and how many classes there are."""
        return {"in_channels": self.shape_chw[0], "num_classes": len(self.class_names)}

    def operations(self, network: nn.Module | None = None) -> tuple[Operation, ...]:
        """One: from images to logits."""
        x_nchw = TensorSpec(
            name=X_NCHW, shape=("batch", *self.shape_chw), content="(pixel / 255 - mean) / std"
        )
        logits = TensorSpec(name=LOGITS, shape=("batch", len(self.class_names)), content="of each class")
        return (Operation(inputs=(x_nchw,), outputs=(logits,)),)

    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Black images."""
        import torch

        return (torch.zeros(rows, *self.shape_chw),)

    def training_features(
        self,
        stored: Tensors,
        *,
        uniform: Tensor | None = None,
        augment: Config | None = None,
        layout: torch.memory_format | None = None,
    ) -> tuple[Tensor, ...]:
        """`x_nchw`, augmented where there are random numbers for it."""
        import torch

        from hpml.tasks.image_classification.augment import augmented
        from hpml.tasks.image_classification.augment_options import Augment

        pixels_nchw = stored["images"].permute(0, 3, 1, 2).float() / 255
        if uniform is not None and isinstance(augment, Augment):
            pixels_nchw = augmented(pixels_nchw, uniform, augment)
        mean, std = (
            torch.tensor(values, device=pixels_nchw.device)[:, None, None] for values in (self.mean, self.std)
        )
        x_nchw = (pixels_nchw - mean) / std
        if layout is None:  # a copy: one channel counts as contiguous with the strides of NHWC, too
            return (x_nchw.clone(memory_format=torch.contiguous_format),)
        return (x_nchw.contiguous(memory_format=layout),)

    def loss(self, outputs: Outputs, stored: Tensors, *, label_smoothing: float) -> Tensor:
        """The cross-entropy of the logits with the labels."""
        from torch.nn import functional

        return functional.cross_entropy(_logits(outputs), stored["labels"], label_smoothing=label_smoothing)

    def soft_loss(
        self, outputs: Outputs, of_teacher: Outputs, stored: Tensors, *, temperature: float
    ) -> Tensor:
        """The divergence of the softened distributions (Hinton et al. 2015, arXiv:1503.02531)."""
        from hpml.tasks.losses import softened_divergence

        return softened_divergence(_logits(outputs), _logits(of_teacher), temperature)

    def statistics(self, outputs: Outputs, stored: Tensors) -> dict[str, Tensor]:
        """Top-1: whether each image was recognised."""
        import torch

        recognised = _logits(outputs).argmax(dim=1) == stored["labels"]
        return {ACCURACY.name: torch.stack([recognised, torch.ones_like(recognised)], dim=1).double()}

    @property
    def group_names(self) -> tuple[str, ...]:
        """The classes."""
        return self.class_names

    def groups(self, stored: Arrays) -> NDArray[np.int64]:
        """The labels."""
        import numpy as np

        return np.asarray(stored["labels"], np.int64)

    def kept(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """All logits."""
        return {LOGITS: outputs[LOGITS]}

    def observed(self, inputs: Arrays, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Brightness and contrast of each channel, the class and its probability."""
        import numpy as np

        from hpml.tasks.drift.observed import of_logits

        means, deviations = (of(inputs[X_NCHW], axis=(2, 3)) for of in (np.mean, np.std))
        channels = range(means.shape[1])
        return {
            **{f"mean of channel {one}": means[:, one] for one in channels},
            **{f"contrast of channel {one}": deviations[:, one] for one in channels},
            **of_logits(outputs[LOGITS], "class"),
        }

    def endpoint(self) -> Endpoint | None:
        """`/v1/classify`, where it is known how pictures are read."""
        if self.pictures is None:
            return None
        from hpml.tasks.image_classification.classify_endpoint import classify_endpoint

        return classify_endpoint(self, self.class_names, self.pictures)

    def packaging(self) -> Packaging:
        """A script that takes pictures."""
        from hpml.tasks.image_classification.packaging.packaging import PicturesPackaging

        return PicturesPackaging(self)


def _logits(outputs: Outputs) -> Tensor:
    import torch

    assert isinstance(outputs, torch.Tensor)
    return outputs
