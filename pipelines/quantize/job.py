"""What is asked of a quantization, and what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpml.artifacts.interval import Interval
from hpml.core.contract import Config
from hpml.measuring.subjects.tensors import Tensor
from hpml.targets import TOLERANCES

_INT8 = TOLERANCES["int8"]
Positive = Annotated[float, Field(gt=0)]


class Preprocessing(Config):
    """From the pixels of a picture, 0 to 255, to what a model takes: (pixel / scale - mean) / std.

    mean, std: one for all channels, or one for each. A model that takes uint8 gets the pixels themselves.
    """

    scale: Positive = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[Positive, ...] = (1.0,)


class Bounds(Config):
    """Beyond these an int8 model is refused; by default as an engine of a run is.

    max_accuracy_drop: 0.01 is one point. min_top1_agreement: share of samples with the fp32 model's class.
    max_relative_error: of outputs that are no classes; the root of the mean square of the differences, as a
    share of that of the outputs. 0.1 is a signal 20 dB above the noise.
    """

    max_accuracy_drop: float = Field(default=_INT8.max_quality_loss or 0.0, ge=0, le=1)  # of top-1
    min_top1_agreement: float = Field(default=_INT8.min_agreement or 1.0, ge=0, le=1)
    max_relative_error: float = Field(default=0.1, ge=0)


class QuantizeJob(Config):
    """A quantization of the ONNX file `file`, calibrated and judged with what is in `data`."""

    file: Path
    data: Path
    sizes: dict[str, int] = Field(default_factory=dict)  # of the dimensions that the model leaves open
    preprocessing: Preprocessing = Preprocessing()
    calibration: Literal["minmax", "percentile"] = "minmax"
    calibration_samples: int = Field(default=256, ge=1, le=65_536)
    activations: Literal["auto", "uint8", "int8"] = "auto"
    excluded_nodes: tuple[str, ...] = ()  # stay fp32
    bounds: Bounds = Bounds()
    threads: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)


class Judgement(Config):
    """What an int8 model answers beside the same model in fp32, on samples that did not calibrate it.

    output: the one that is judged; where `is_classes`, it is (samples, classes). Accuracies are None without
    labels. nan, infinite: how many of the int8 model's `numbers`.
    """

    output: str
    is_classes: bool
    samples: int
    accuracy_fp32: Interval | None = None
    accuracy_int8: Interval | None = None
    accuracy_change: Interval | None = None  # paired; -0.01 is one point lost
    mcnemar_p: float | None = None
    top1_agreement: Interval | None = None
    max_abs_error: float
    relative_error: float
    numbers: int
    nan: int = 0
    infinite: int = 0
    refusal: str = ""  # why the gate refuses; empty if it does not


class Quantized(Config):
    """An int8 model and how it came about."""

    inputs: tuple[Tensor, ...]  # with every size
    sizes: dict[str, int] = Field(default_factory=dict)  # of the dimensions that the model leaves open
    calibrated: int  # samples
    activations: Literal["uint8", "int8"]
    weight_bits: int
    quantized: dict[str, int]  # operator -> how many of them compute between Q/DQ
    left: dict[str, int]  # operator -> how many are left in fp32
    size_bytes: int
    judgement: Judgement
    notes: tuple[str, ...] = ()
