"""What every target is: a config that can build an engine from a model, and load it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model import ModelSpec
from hpml.core.contract import Config, Output, renamed
from hpml.tasks.base import Runs, Task

Precision = Literal["fp32", "fp16", "bf16", "int8"]
Profiler = Literal["torch", "onnxruntime", "tensorrt", "openvino"]


@dataclass(frozen=True)
class Built:
    """What a target wrote into the output folder.

    file: what the runtime opens. graphs: the file of each graph, where there are several. companions: files
    beside it that no runtime opens; they do not count as the engine's size. identity: what the engine is
    bound to, and the runtime's version.
    notes: choices made while building that a reader should know; they are part of the artifact's identity,
    so they hold no timings. variants: the same built otherwise, each in the output folder's folder of that
    name, where only a measurement can say which is faster.
    """

    file: str
    precision: Precision
    identity: dict[str, str]
    notes: tuple[str, ...] = field(default_factory=tuple)
    graphs: Mapping[str, str] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    variants: Mapping[str, Built] = field(default_factory=dict)


@dataclass(frozen=True)
class NotBuilt:
    """This machine lacks what the target needs; the variant is reported with the reason."""

    reason: str


class Tolerance(Config):
    """How far an engine may be from its network in torch, fp32, over the validation split.

    A bound that is None is that of the engine's precision, see TOLERANCES.
    """

    max_abs_error: float | None = Field(default=None, ge=0)  # of any number of the judged output
    # The root of the mean square of its errors, as a share of that of the network's own.
    max_relative_error: float | None = Field(default=None, ge=0)
    min_agreement: float | None = Field(default=None, ge=0, le=1)  # share of decisions that are the same
    # Share of what is generated step by step that is the same, up to where the two part.
    min_generation_agreement: float | None = Field(default=None, ge=0, le=1)
    # Of the task's metric: of a share in points (0.01 = 1 point), else relative (0.01 = 1 %).
    max_quality_loss: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _by_their_names_of_before(cls, given: Any) -> Any:
        return renamed(given, max_accuracy_drop="max_quality_loss", min_top1_agreement="min_agreement")

    def or_else(self, other: Tolerance) -> Tolerance:
        """These bounds, and those of `other` where there is none."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


# Other kernels add the same fp32 products in another order: errors of 1e-5 on logits of 10. fp16 keeps 11
# bits. A logit of an int8 engine may be off by a step of its scale, and bf16 keeps 8 bits, so what counts
# there is what it decides.
# Where nothing is decided, the output is the answer: a price in euros or a share, of any size. No error in
# its unit is large or small by itself then, so it is judged as a share of the output (`tolerance_of`).
TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(
        max_abs_error=1e-3, min_agreement=0.999, min_generation_agreement=0.98, max_quality_loss=0.001
    ),
    "fp16": Tolerance(max_abs_error=0.25, min_agreement=0.99, max_quality_loss=0.005),
    "bf16": Tolerance(min_agreement=0.99, max_quality_loss=0.005),
    "int8": Tolerance(min_agreement=Task.int8_agreement, max_quality_loss=0.02),
}
_RELATIVE_ERRORS: dict[Precision, float] = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.05, "int8": 0.1}


def tolerance_of(precision: Precision, given: Tolerance, task: Task, *, decides: bool) -> Tolerance:
    """`given`, and where it has no bounds those of the precision.

    decides: whether the outputs decide something, as logits do; see TOLERANCES.
    """
    default = TOLERANCES[precision]
    if precision == "int8":
        default = default.model_copy(update={"min_agreement": task.int8_agreement})
    if not decides:
        relative = _RELATIVE_ERRORS[precision]
        default = default.model_copy(update={"max_abs_error": None, "max_relative_error": relative})
    return given.or_else(default)


MOST_BYTES = 2**31 - 1  # of an ONNX file, a protobuf message
MOST_WEIGHTS = MOST_BYTES // 4  # networks are exported in fp32


class Target(Config, ABC):
    """Base of the targets. A subclass adds `target: Literal["its-name"]`, its options, and these methods.

    libraries: what runs its engines, by the names on PyPI: their versions stand beside every figure.
    extra: the extra of hpml-pipeline that installs them; empty where the stages need them anyway.
    profiler: which of the diagnosis's profilers times its layers; None if none does.
    triton_platform: what NVIDIA Triton calls such an engine; empty: a bundle of it has no model repository.
    is_standalone: whether a bundle's own script runs it, with numpy and ONNX Runtime alone.
    most_weights: of one graph; None: as many as fit into memory.
    """

    libraries: ClassVar[tuple[str, ...]]
    extra: ClassVar[str] = ""
    profiler: ClassVar[Profiler | None] = None
    triton_platform: ClassVar[str] = ""
    is_standalone: ClassVar[bool] = False
    most_weights: ClassVar[int | None] = None

    target: str
    tolerance: Tolerance = Tolerance()  # beyond it an engine is rejected

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target

    def missing(self) -> str:
        """What this machine lacks to build or load such an engine; empty if nothing. Imports no library."""
        return ""

    @abstractmethod
    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Write the engine of `model` into `out.path`. Called only where nothing is `missing`."""

    @abstractmethod
    def load(self, folder: Path, engine: EngineSpec, *, threads: int, spinning: bool | None = None) -> Runs:
        """Load the engine in `folder` (an artifact's or a bundle's).

        spinning: as in `EngineSettings`; a runtime without such a switch takes no notice of it.
        Raises StageFailed if the engine is bound to other hardware or versions than these.
        """

    def foreign_reason(self, engine: EngineSpec) -> str:
        """Why `engine` is bound to other hardware than this machine's; empty if it is not. Loads nothing."""
        return ""

    def candidates(self, engine: EngineSpec, threads: int) -> tuple[EngineSettings, ...]:
        """The settings worth trying with at most `threads` threads, those of its runtime's default first."""
        return (EngineSettings(threads=threads),)

    def unprofiled_reason(self, engine: EngineSpec, files: Collection[str]) -> str:
        """Why the layers of `engine`, an artifact of these files, cannot be timed; empty if they can."""
        return "" if self.profiler else f"layers of {self.target} cannot be timed"
