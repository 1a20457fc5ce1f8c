"""What a model can be exported to. A target is one file here and one row of TARGETS.

A target both builds an engine and loads it again, so that the gate of `export`, the benchmark and the check
of the deployable bundle run the very same code on the very same files. Importing this package imports neither
torch nor a vendor's library: they are imported inside the functions that use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator

from hpml.core.contract import BareName
from hpml.targets.base import TOLERANCES, Built, NotBuilt, Target, Tolerance, tolerance_of
from hpml.targets.eager import Eager
from hpml.targets.onnx import Onnx
from hpml.targets.openvino import OpenVino
from hpml.targets.tensorrt import TensorRT

TARGETS: dict[str, type[Target]] = {
    "eager": Eager,  # torch as it is: the reference of every speed-up
    "onnx": Onnx,
    "tensorrt": TensorRT,
    "openvino": OpenVino,
}

if TYPE_CHECKING:
    AnyTarget = Target
else:
    AnyTarget = Annotated[
        Union[tuple(TARGETS.values())],  # noqa: UP007
        Discriminator("target"),
        BareName("target"),
    ]

__all__ = [
    "TARGETS",
    "TOLERANCES",
    "AnyTarget",
    "Built",
    "Eager",
    "NotBuilt",
    "Session",
    "Target",
    "Tolerance",
    "tolerance_of",
]
